"""A world starts over a new store, or over the script's process group, or fails in time by name."""

from __future__ import annotations

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.comm.secret import Secret
from echelon.comm.streams import PlainDevice, kinds
from echelon.comm.torch_dist import bound_device, connect, from_process_group
from echelon.comm.torch_dist import start as start_module
from echelon.comm.torch_dist.engines import Engine
from echelon.comm.torch_dist.job import Job
from echelon.comm.torch_dist.start import GroupFactory, check_wanted
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.errors import (
    ArgumentError,
    AuthenticationError,
    CommTimeout,
    RankFailed,
    WorldError,
)
from echelon.process.environment import environment
from tests.comm.gloo_ranks import local_job, start
from tests.processes import free_port

# --- rank functions ----------------------------------------------------------------------------


def start_on_one_rank_alone(rank: int, port: int) -> None:
    if rank == 1:
        begin = start_module.start_gloo

        def begin_in_vain(*args: Any, **options: Any) -> Engine:
            begin(*args, **options)
            raise RuntimeError("no such interface")

        start_module.start_gloo = begin_in_vain
    with connect(
        local_job(rank, 2, port), "gloo", device=torch.device("cpu"), timeout=10.0
    ) as world:
        world.group.barrier()


def start_while_a_peer_fails(rank: int, port: int) -> None:
    begin = start_module.start_gloo

    def begin_in_vain(store: c10d.Store, *args: Any, **options: Any) -> Engine:
        engine = begin(store, *args, **options)  # kept, or gloo itself would fail on one
        store.set(f"begun/{rank}", "")
        store.wait([f"begun/{other}" for other in range(3)])
        del engine
        if rank == 1:
            time.sleep(0.2)  # so that its record is the later one
            raise RuntimeError("no such interface")
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:553] " + lost[rank])

    lost = {0: "Connection closed by peer [127.0.0.1]:1", 2: "Connection reset by peer [::1]:1"}
    start_module.start_gloo = begin_in_vain
    connect(local_job(rank, 3, port), "gloo", device=torch.device("cpu"), timeout=10.0)


def wrap_the_default_group(rank: int, port: int) -> list[float]:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = from_process_group(dist.group.WORLD)
    tensor = torch.tensor([float(rank)])
    group.all_reduce(tensor, "mean")
    dist.all_reduce(tensor)  # the process group stays usable beside it
    group.close()
    dist.destroy_process_group()
    return tensor.tolist()


def wrap_a_group_of_a_device(rank: int, port: int, bound: int | None) -> list[str]:
    """Over torch's engine for tests, which takes the device for one that is there."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    torch.cuda.current_device = lambda: 0
    dist.init_process_group("cuda:fake", store=c10d.HashStore(), rank=rank, world_size=1)
    default: Any = dist.group.WORLD
    if bound is not None:  # as device_id= does, which looks for the device first
        default.bound_device_id = torch.device("cuda", bound)
    places = [str(bound_device()), str(from_process_group(default).device)]
    for number in (0, 1):
        try:
            group = from_process_group(default, device=torch.device("cuda", number))
            places.append(str(group.device))
        except ArgumentError as error:
            places.append(str(error))
    return places


def meet_on_the_host(rank: int, store: c10d.Store) -> tuple[str, str, float]:
    factory = GroupFactory(
        job=Job(store, RankMonitor.alone(rank)),
        secret=Secret(b"s" * 32),
        backend="nccl",
        device=torch.device("cuda", rank),
        timeout=10.0,
        check=False,
        loopback=True,
        one_host=True,
    )
    group = factory._make_on("world.1", (0, 1), torch.device("cpu"))
    tensor = torch.tensor([rank + 1.0])
    group.all_reduce(tensor)
    return type(group).__name__, str(group.device), tensor.item()


class OneDevice(PlainDevice):
    """A device that all ranks of a host have been given."""

    def identity(self) -> str:
        return "GPU-1234"


def claim(rank: int, store: c10d.Store) -> str:
    factory = GroupFactory(
        job=Job(store, RankMonitor.alone(rank)),
        secret=Secret(b"s" * 32),
        backend="nccl",
        device=torch.device("cuda", 0),
        timeout=10.0,
        check=False,
        loopback=True,
        one_host=True,
    )
    try:
        factory._claim_device("world")
    except WorldError as error:
        return str(error)
    return "its own"


def start_from_slurm(rank: int, port: int) -> float:
    variables = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }
    job = environment(variables)
    assert job is not None
    with connect(job, "gloo", device=torch.device("cpu"), timeout=20.0) as world:
        tensor = torch.tensor([world.rank + 1.0])
        world.group.all_reduce(tensor)
        return tensor.item()


# --- tests ------------------------------------------------------------------------------------


def test_a_rank_that_cannot_start_its_engine_says_so_to_those_that_have() -> None:
    (ready, _), (failed, _) = start(start_on_one_rank_alone, 2, (free_port(),))
    assert isinstance(failed, WorldError)
    assert isinstance(ready, RankFailed)
    assert ready.failed_rank == 1
    assert ready.cause.startswith(
        "raised WorldError: rank 1 of 2 could not start gloo: no such interface"
    )


def test_a_rank_whose_peer_fails_while_they_connect_blames_the_peer_and_not_its_network() -> None:
    """gloo says the same of a peer that has ended as of an interface that cannot be reached."""
    outcomes = [outcome for outcome, _ in start(start_while_a_peer_fails, 3, (free_port(),))]
    assert isinstance(outcomes[1], WorldError)
    assert "rank 1 of 3 could not start gloo: no such interface" in str(outcomes[1])
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, RankFailed)
        assert outcome.failed_rank == 1
        assert "no such interface" in outcome.cause


def test_slurm_variables_start_a_world() -> None:
    outcomes = start(start_from_slurm, 2, (free_port(),))
    assert [outcome for outcome, _ in outcomes] == [3.0, 3.0]


def test_a_process_group_of_the_user_is_wrapped_and_stays_the_users() -> None:
    outcomes = start(wrap_the_default_group, 2, (free_port(),))
    assert [outcome for outcome, _ in outcomes] == [[1.0], [1.0]]


def test_a_process_group_is_used_on_the_device_that_it_is_bound_to_or_on_the_current_one() -> None:
    ((free, _),) = start(wrap_a_group_of_a_device, 1, (free_port(), None))
    assert free == ["None", "cuda:0", "cuda:0", "cuda:1"]
    ((bound, _),) = start(wrap_a_group_of_a_device, 1, (free_port(), 1))
    assert bound[:2] == ["cuda:1", "cuda:1"]
    assert "is bound to cuda:1 (device_id of init_process_group), and cuda:0 is" in bound[2]
    assert bound[3] == "cuda:1"


def test_two_ranks_on_one_device_are_named_before_nccl_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(kinds, "cuda", OneDevice)
    store = c10d.HashStore()
    assert claim(0, store) == "its own"
    assert "ranks 0 and 1 have one device, cuda:0 (GPU-1234), and NCCL takes" in claim(1, store)


def test_a_group_on_the_host_of_a_job_over_nccl_is_one_of_gloo() -> None:
    store = c10d.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(meet_on_the_host, range(2), [store] * 2))
    assert made == [("PeerGroup", "cpu", 3.0)] * 2


@pytest.mark.slow
def test_ranks_that_do_not_start_are_named() -> None:
    with pytest.raises(CommTimeout, match=r"start of the world waited .* s for ranks 1, 2") as info:
        connect(local_job(0, 3, free_port()), "gloo", device=torch.device("cpu"), timeout=0.5)
    assert info.value.missing == (1, 2)


def test_a_stranger_who_wins_each_race_ends_the_start_of_all_ranks_by_name() -> None:
    """Each of three trials has new connections; here the other one has another secret in all."""
    store = c10d.HashStore()

    def outcome(rank: int) -> str:
        factory = GroupFactory(
            job=Job(c10d.PrefixStore("job", store), RankMonitor.alone(rank)),
            secret=(Secret(b"s" * 32), Secret(b"o" * 32))[rank],
            backend="gloo",
            device=torch.device("cpu"),
            timeout=20.0,
            check=False,
            loopback=True,
            one_host=True,
        )
        try:
            factory.make("world", (0, 1))
        except AuthenticationError as error:
            return f"{error.ranks} {error}"
        return "made"

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(outcome, range(2)))
    assert all(text.startswith("(0, 1) what speaks as ranks 0, 1 in") for text in outcomes)
    assert store.check(["job/group/world/2/strangers"])  # it was tried three times
    assert not store.check(["job/group/world/3/strangers"])


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), (None, False)])
def test_echelon_check_is_read(
    value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ECHELON_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("ECHELON_CHECK", value)
    assert check_wanted() is wanted


def test_another_value_of_echelon_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CHECK", "yes")
    with pytest.raises(WorldError, match="ECHELON_CHECK is 'yes'"):
        check_wanted()
