"""Programs that ask for torch's own backends get our groups, and are told so once."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import echelon as ec
from echelon.c10d.process_group import ProcessGroupEchelon
from echelon.c10d.served_backends import OWN_VARIABLE, is_served

BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl", None, "mpi", "echelon")


def asks_for(world: ec.World, backend: str | None) -> tuple[str, str, int]:
    dist.init_process_group(backend)
    assert isinstance(dist.group.WORLD, ProcessGroupEchelon)
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    subgroup = dist.new_group([1, 0])
    dist.barrier(subgroup)
    backends = dist.get_backend(), dist.get_backend(subgroup)
    dist.destroy_process_group()
    return *backends, int(total.item())


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
@pytest.mark.filterwarnings("ignore:For MPI backend, world_size")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_of_torch_is_served_under_its_name(backend: str | None) -> None:
    name = "undefined" if backend is None else backend
    assert ec.run(asks_for, 2, args=(backend,)) == [(name, name, 3)] * 2


def test_processes_are_served_over_shared_memory() -> None:
    assert ec.run(asks_for, 2, "processes", args=("gloo",)) == [("gloo", "gloo", 3)] * 2


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_ranks_that_differ_in_a_group_of_nccl_are_told_so_and_not_that_there_is_no_nccl(
    kind: str,
) -> None:
    with pytest.raises(ec.CollectiveMismatch, match="all_reduce"):
        ec.run(disagree, 2, kind)


def disagree() -> None:
    dist.init_process_group("nccl")
    tensor = torch.ones(1)
    dist.broadcast(tensor, 0) if dist.get_rank() else dist.all_reduce(tensor)


def test_a_group_of_more_ranks_than_the_job_has_is_refused() -> None:
    def main() -> None:
        dist.init_process_group("gloo", world_size=3, rank=0)

    with pytest.raises(ec.ArgumentError, match=r"a group of 3 ranks .* this job has 2"):
        ec.run(main, 2)


def keeps_gloo(world: ec.World) -> tuple[bool, int]:
    os.environ.update({OWN_VARIABLE: "1", "GLOO_SOCKET_IFNAME": "lo"})
    total = torch.tensor([world.rank + 1])
    dist.init_process_group("gloo")
    dist.all_reduce(total)
    is_ours = isinstance(dist.group.WORLD, ProcessGroupEchelon)
    dist.destroy_process_group()
    return is_ours, int(total.item())


def test_a_variable_keeps_torchs_own_backend_in_processes() -> None:
    assert ec.run(keeps_gloo, 2, "processes") == [(False, 3)] * 2


def group_timeouts(world: ec.World) -> list[float]:
    os.environ["ECHELON_TIMEOUT"] = "7"
    dist.init_process_group("gloo")
    groups = [dist.group.WORLD, dist.new_group([0, 1], timeout=timedelta(seconds=9))]
    timeouts = [group._group.timeout for group in groups if isinstance(group, ProcessGroupEchelon)]
    dist.destroy_process_group()
    return timeouts


@pytest.mark.parametrize("world", ["threads", "processes"])
def test_the_timeout_of_the_environment_is_that_of_groups_without_one(world: str) -> None:
    assert ec.run(group_timeouts, 2, world) == [[7.0, 9.0]] * 2


def test_what_we_do_not_serve_is_left_to_torch() -> None:
    assert not is_served("fake")
    assert not is_served("cpu:gloo,cuda:custom")


def initializes(world: ec.World) -> None:
    dist.init_process_group("gloo")
    dist.destroy_process_group()
    dist.init_process_group("nccl")


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
def test_it_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    from echelon.c10d import served_backends

    served_backends._said.clear()
    ec.run(initializes, 3)
    assert capfd.readouterr().err == (
        'echelon: init_process_group asks for "gloo" and gets 3 simulated ranks of echelon, '
        "threads that take turns in this process\n"
    )
