"""Calls that differ between ranks are shown on every rank, whether or not calls are compared."""

from collections.abc import Callable

import pytest
import torch

from echelon.comm.world import World
from echelon.errors import CollectiveMismatch
from tests.comm.gloo_ranks import gloo_errors


def reduce_another_shape(world: World) -> None:
    world.group.barrier()
    world.group.all_reduce(torch.ones(11 if world.rank == 1 else 10))


def reduce_with_another_operation(world: World) -> None:
    world.group.all_reduce(torch.ones(10), "max" if world.rank == 1 else "sum")


def expect_another_length(world: World) -> None:
    size, lacking = world.size, world.rank == 0
    splits = [1] * (size - 1) + [2 if lacking else 1]
    world.group.all_to_all_single(torch.empty(sum(splits)), torch.ones(size), splits, [1] * size)


def send_another_length(world: World) -> None:
    if world.rank == 0:
        world.group.send(torch.ones(6), 1)
    elif world.rank == 1:
        world.group.recv(torch.ones(4), 0)


@pytest.mark.parametrize(
    ("fn", "shows"),
    [
        (reduce_another_shape, "rank 1: all_reduce(sum) float32[11] at "),
        (reduce_with_another_operation, "rank 1: all_reduce(max) float32[10] at "),
        (expect_another_length, "expects [1, 1, 2] elements at "),
    ],
)
@pytest.mark.parametrize("native", [False, True], ids=["gloo", "engine"])
def test_calls_that_differ_are_shown_on_every_rank_when_they_are_compared(
    fn: Callable[[World], None], shows: str, native: bool
) -> None:
    for error in gloo_errors(fn, timeout=3.0, check=True, native=native):
        assert isinstance(error, CollectiveMismatch)
        assert shows in str(error)
        assert f"in {fn.__name__}   <-- differs" in str(error)
        assert sorted(error.calls) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("fn", [reduce_another_shape, send_another_length])
def test_calls_that_differ_never_meet_and_are_shown_after_the_timeout(
    fn: Callable[[World], None],
) -> None:
    outcomes = gloo_errors(fn, ranks=2, timeout=3.0)
    assert [type(error) for error in outcomes] == [CollectiveMismatch] * 2, outcomes
    assert [sorted(error.calls) for error in outcomes] == [[0, 1]] * 2
