"""Each simulated rank has torch's globals for itself, and the caller's are back afterwards."""

import ast
import importlib
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread, current_thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import enable_wrap, wrap
from torch.nn.utils import parametrize

import echelon as ec
from echelon.c10d.torch_globals import PLACES
from echelon.errors import CommTimeout

# Globals that functions of torch.distributed assign and ranks may share, and why.
SHARED = {
    "torch.distributed._composable_state": "states of modules, by the module",
    "torch.distributed._local_tensor": "torch's own simulation of ranks, which is no rank's state",
    "torch.distributed._symmetric_memory._use_implicit_mempool": "of a GPU",
    "torch.distributed._symmetric_memory._is_test_mode": "of torch's own tests",
    "torch.distributed._symmetric_memory._mocked_group_names": "of torch's own tests",
    "torch.distributed.debug": "a server of the process",
    "torch.distributed.device_mesh._distributed_opaque_types_registered": "done once in a process",
    "torch.distributed.device_mesh._mesh_resources": "of each thread",
    "torch.distributed.rendezvous._rendezvous_handlers": "schemes, which the program registers",
    "torch.distributed._functional_collectives._FORCE_TRACING": "of the compiler",
    "torch.distributed.fsdp._fully_shard._fsdp_common._compiled_autograd_enabled": (
        "of the compiler, in torch 2.11"
    ),
}
# Packages whose processes a simulated rank does not start.
NOT_OF_RANKS = ("elastic", "rpc", "launcher", "_tools")


def assigned_globals() -> Iterator[str]:
    """Names that a function of torch.distributed declares as global, and assigns."""
    root = Path(dist.__file__).parent
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in NOT_OF_RANKS:
            continue
        module = ".".join(("torch.distributed", *(part for part in parts if part != "__init__")))
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            names = {
                n for each in ast.walk(function) if isinstance(each, ast.Global) for n in each.names
            }
            assigned = {
                each.id
                for each in ast.walk(function)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
            yield from (f"{module}.{name}" for name in names & assigned)


@pytest.mark.slow
def test_every_global_that_torch_distributed_assigns_is_each_ranks_own_or_shared_for_a_reason() -> (
    None
):
    own = {f"{place.holder}.{name}" for place in PLACES for name in place.names}
    unknown = {
        name
        for name in assigned_globals()
        if name not in own and not any(f"{name}.".startswith(f"{shared}.") for shared in SHARED)
    }
    assert unknown == set()


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.holder}.{place.names[0]}")
def test_each_place_is_in_this_torch(place: Any) -> None:
    module = importlib.import_module(place.holder)
    for name in place.names:
        *holders, attribute = name.split(".")
        holder: Any = module
        for each in holders:
            holder = getattr(holder, each)
        assert attribute in vars(holder)
    assert place.reason


def changes_everything(world: ec.World) -> list[object]:
    assert not dist.is_initialized()
    before = [distributed_c10d._group_count, distributed_c10d._backend, dist.get_debug_level()]
    dist.init_process_group("gloo")
    for _ in range(world.rank):
        dist.new_group([world.rank], use_local_synchronization=True)
    distributed_c10d._backend = f"of rank {world.rank}"
    if world.rank == 1:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    world.group.barrier()
    assert distributed_c10d._backend == f"of rank {world.rank}"
    assert (dist.get_debug_level() == dist.DebugLevel.DETAIL) == (world.rank == 1)
    assert len(distributed_c10d._pg_names) == 1 + world.rank
    total = functional.all_reduce(torch.tensor([world.rank]), "sum", dist.group.WORLD)
    return [*before, total.item()]


def test_ranks_see_nothing_of_one_another_and_leave_nothing_behind() -> None:
    names = (
        "_new_process_group_helper",
        "_world",
        "_pg_map",
        "TCPStore",
        "_backend",
        "_group_count",
    )
    before = [getattr(distributed_c10d, name, None) for name in names]
    level, hook = dist.get_debug_level(), sys.excepthook
    assert ec.run(changes_everything, 3) == [[0, None, level, 3]] * 3
    assert [getattr(distributed_c10d, name, None) for name in names] == before
    assert dist.get_debug_level() == level
    assert sys.excepthook is hook
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="0"):
        distributed_c10d._resolve_process_group("0")


def test_a_group_of_the_caller_is_hidden_from_ranks_and_is_there_afterwards() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        default = dist.group.WORLD
        ec.run(changes_everything, 2)
        assert dist.group.WORLD is default
        total = functional.all_reduce(torch.ones(2), "sum", default)
        assert torch.equal(total + 0, torch.ones(2))
    finally:
        dist.destroy_process_group()


def replaces_the_hook(world: ec.World) -> object:
    hook = sys.excepthook
    sys.excepthook = lambda *error: None
    world.group.barrier()
    return hook


def test_no_rank_begins_with_the_hook_that_another_one_has_set() -> None:
    """Or init_process_group of rank 1 prints the number of rank 0 as well."""
    hook = sys.excepthook
    assert ec.run(replaces_the_hook, 3) == [hook] * 3


def fails(world: ec.World) -> None:
    dist.init_process_group("gloo")
    if world.rank == 1:
        raise KeyError("boom")
    dist.barrier()


@pytest.mark.slow
def test_an_overtaken_rank_finds_its_own_groups_and_not_those_of_the_rank_that_runs() -> None:
    left, right = socket.socketpair()
    goes_on: list[int] = []

    def main(world: ec.World) -> float:
        dist.init_process_group("gloo")
        if world.rank == 1:  # the last to come, which goes on
            left.recv(1)  # in C code, so the other gets its turn
            goes_on.append(dist.get_rank())
        else:
            right.send(b"x")
            end_s = time.monotonic() + 0.5
            while not goes_on and time.monotonic() < end_s:
                pass  # and has it when rank 1 goes on
        total = torch.tensor([world.rank + 1.0])
        dist.all_reduce(total)
        return total.item()

    with left, right, pytest.warns(RuntimeWarning, match="rank 1 was blocked for 2 s"):
        assert ec.run(main, 2, timeout=60) == [3, 3]
    assert goes_on == [1]


@pytest.mark.slow
def test_a_rank_that_is_left_behind_makes_no_groups_for_the_caller() -> None:
    left, right = socket.socketpair()
    threads: list[Thread] = []

    def main(world: ec.World) -> None:
        threads.append(current_thread())
        dist.init_process_group("gloo")  # from which rank 0 does not come back
        if world.rank == 1:
            left.recv(1)

    with left, right:
        with pytest.raises(CommTimeout, match=r"turn of rank 0 waited .* for rank 1"):
            ec.run(main, 2, timeout=0.5)
        right.send(b"x")
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_thread_that_a_rank_has_started_finds_the_groups_of_its_rank() -> None:
    seen: list[tuple[int, int]] = []

    def main(world: ec.World) -> float:
        dist.init_process_group("gloo")
        pair = dist.new_group([0, 1])
        total = torch.tensor([world.rank + 1.0])

        def reduce() -> None:
            time.sleep(0.3)  # the last rank has its turn then
            seen.append((world.rank, dist.get_rank()))
            dist.all_reduce(total)
            if world.rank < 2:
                dist.all_reduce(total, group=pair)

        thread = Thread(target=reduce)
        thread.start()
        dist.barrier()
        if world.rank == 2:
            end_s = time.monotonic() + 0.6
            while time.monotonic() < end_s:
                pass
        thread.join()
        return total.item()

    assert ec.run(main, 3, timeout=20) == [12.0, 12.0, 6.0]
    assert sorted(seen) == [(0, 0), (1, 1), (2, 2)]


def test_the_globals_are_back_after_an_error() -> None:
    helper = distributed_c10d._new_process_group_helper
    with pytest.raises(KeyError, match="boom"):
        ec.run(fails, 3)
    assert distributed_c10d._new_process_group_helper is helper
    assert not dist.is_initialized()


def wraps_and_saves(world: ec.World) -> list[str]:
    dist.init_process_group("gloo")
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=torch.device("cpu")):
        layer = wrap(nn.Linear(2, 2, bias=False))
        dist.barrier()
        model = wrap(nn.Sequential(layer, nn.Linear(2, 1)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return sorted(FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:`_get_pg_default_device`")
def test_ranks_of_the_older_fsdp_wrap_and_save_side_by_side() -> None:
    assert ec.run(wraps_and_saves, 2) == [["0.weight", "1.bias", "1.weight"]] * 2


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def reads_a_parametrized_weight_again(world: ec.World) -> list[float]:
    dist.init_process_group("gloo")
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    parametrize.register_parametrization(layer, "weight", Doubled())
    with parametrize.cached():
        values = [layer.weight.item()]
        dist.barrier()
        if world.rank == 1:  # stays in its body while rank 0 leaves its own and enters another
            dist.barrier()
            return values
    parts: Any = layer.parametrizations
    nn.init.constant_(parts["weight"].original, 3)
    with parametrize.cached():
        values.append(layer.weight.item())
    dist.barrier()
    return values


def test_a_parametrization_is_not_taken_from_a_cache_that_another_rank_keeps_open() -> None:
    assert ec.run(reads_a_parametrized_weight_again, 2) == [[2, 6], [2]]
