"""A wrapper that is dropped is freed, with its parameters and its shared memory."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World

WRAPPERS = {
    "DDP": lambda model, group: ec.DDP(model, group),
    "manual DDP": lambda model, group: ec.DDP(model, group, sync="manual"),
    "FSDP": lambda model, group: ec.FSDP(model, group, min_num_params=0),
}


def count_segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:echelon")


def collect(world: World) -> None:
    """One rank after another: the collector of a process runs once at a time."""
    for rank in range(world.size):
        world.group.barrier()
        if rank == world.rank:
            gc.collect()
    world.group.barrier()


def drops(world: World, name: str) -> None:
    def train() -> weakref.ref[nn.Parameter]:
        plain = nn.Linear(300, 300)
        model = WRAPPERS[name](plain, world.group)
        model(torch.randn(2, 300)).sum().backward()
        if name == "manual DDP":
            model.sync_gradients()
        return weakref.ref(plain.weight)

    train()  # what is made once
    collect(world)
    segments = count_segments()
    refs = [train() for _ in range(3)]
    collect(world)
    assert [ref() for ref in refs] == [None] * 3
    assert count_segments() == segments


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_dropped_wrapper_is_freed(kind, name) -> None:
    ec.run(drops, 2, kind, args=(name,))


def rewraps(world: World) -> None:
    model = nn.Linear(2, 2)
    ec.DDP(model, world.group)
    collect(world)
    model(torch.ones(1, 2)).sum().backward()  # a plain module again
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
    ec.DDP(model, world.group)


@pytest.mark.slow
def test_the_module_of_a_dropped_wrapper_is_a_plain_one() -> None:
    ec.run(rewraps, 2)
