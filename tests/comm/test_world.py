"""A world that has ended says so, whatever is called on what it leaves behind."""

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.errors import StateError
from tests.worlds import KINDS, run_world


def called_after_the_end(world: ec.World) -> dict[str, str]:
    """What each call raises on this rank."""
    group, x = world.group, torch.full((2, 4), 1.0 + world.rank)
    ddp = ec.DDP(nn.Linear(4, 1), group)
    fsdp = ec.FSDP(nn.Linear(4, 1), group)
    for model in (ddp, fsdp):
        model(x).sum().backward()
    world.close()
    calls = {
        "barrier": group.barrier,
        "all_reduce": lambda: group.all_reduce(torch.ones(1), async_op=True).wait(),
        "send": lambda: group.send(torch.ones(1), 1 - world.rank),
        "ddp": lambda: ddp(x).sum().backward(),
        "fsdp": lambda: fsdp(x),
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
        except StateError as error:
            told[name] = str(error)
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_calls_after_the_end_of_a_world_say_that_it_is_closed(kind: str) -> None:
    for told in run_world(kind, called_after_the_end, 2):
        assert list(told) == ["barrier", "all_reduce", "send", "ddp", "fsdp"]
        assert all("clos" in text and "world" in text for text in told.values()), told


def test_what_a_simulated_rank_returned_is_closed_too() -> None:
    groups = ec.run(lambda world: world.group, 2)
    with pytest.raises(StateError, match=r"barrier .* was issued after its world was closed"):
        groups[0].barrier()


def sample_without_a_process_group(world: ec.World) -> list[str]:
    with pytest.raises(ValueError, match="Default process group") as info:
        torch.utils.data.DistributedSampler(range(10))
    world.explain(info.value)
    sampler = torch.utils.data.DistributedSampler(range(10), world.size, world.rank, shuffle=False)
    assert list(sampler) == list(range(10))[world.rank :: world.size]  # as it advises
    return list(info.value.__notes__)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_that_asks_for_a_process_group_is_told_of_ours(kind: str) -> None:
    for notes in run_world(kind, sample_without_a_process_group, 2):
        assert any("ec.ResumableSampler" in note for note in notes)
