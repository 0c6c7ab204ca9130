"""How a call reads in a terminal and in a notebook, for each kind of collective."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import echelon as ec


def text_of(fn: Callable[[ec.World], None], ranks: int = 2) -> str:
    """The last call of a function as text, without the path of this file."""
    (*_, call) = ec.step_through(fn, ranks)
    return re.sub(r"\S+test_stepped_call\.py:\d+ in \w+", "LINE", str(call))


def all_reduce(world: ec.World) -> None:
    """In place."""
    world.group.all_reduce(torch.tensor([1.0, world.rank]), label="loss")


def broadcast(world: ec.World) -> None:
    """From the last rank."""
    world.group.broadcast(torch.full((2, 1), world.rank), src=1)


def all_gather(world: ec.World) -> None:
    """Unequal parts."""
    parts = [torch.empty(1), torch.empty(2)]
    world.group.all_gather(parts, torch.full((1 + world.rank,), 0.5))


def reduce_scatter(world: ec.World) -> None:
    """The sum of two ranks, of which each gets a half."""
    output = torch.empty(2, dtype=torch.int32)
    world.group.reduce_scatter_single(output, torch.arange(4, dtype=torch.int32))


def all_to_all(world: ec.World) -> None:
    """One row for each rank."""
    rows = torch.arange(2) + 10 * world.rank
    world.group.all_to_all_single(torch.empty_like(rows), rows)


def gather(world: ec.World) -> None:
    """Everything to rank 1."""
    outputs = [torch.empty(1), torch.empty(1)] if world.rank == 1 else None
    world.group.gather(torch.tensor([float(world.rank)]), outputs, dst=1)


def message(world: ec.World) -> None:
    """From rank 1 to rank 0."""
    if world.rank == 1:
        world.group.send(torch.tensor([2.5]), 0, tag=3)
    else:
        world.group.recv(torch.zeros(1), 1, tag=3)


def barrier(world: ec.World) -> None:
    """Moves nothing."""
    world.group.barrier(label="set up")


@pytest.mark.parametrize(
    ("fn", "lines"),
    [
        (
            all_reduce,
            [
                "call 1: all_reduce(sum) float32[2] of 'loss' in group 'world' of ranks 0, 1",
                "  at LINE",
                "           before     after      gets",
                "  rank 0   [1., 0.]   [2., 1.]   8 B from rank 1",
                "  rank 1   [1., 1.]   [2., 1.]   8 B from rank 0",
            ],
        ),
        (
            broadcast,
            [
                "call 1: broadcast int64[2, 1] from rank 1 in group 'world' of ranks 0, 1",
                "  at LINE",
                "           before   after       gets",
                "  rank 0   [0, 0]   [1, 1]      16 B from rank 1",
                "  rank 1   [1, 1]   unchanged",
            ],
        ),
        (
            all_gather,
            [
                "call 1: all_gather float32[3] in group 'world' of ranks 0, 1",
                "  at LINE",
                "           before       after              gets",
                "  rank 0   [0.5]        [0.5 | 0.5, 0.5]   8 B from rank 1",
                "  rank 1   [0.5, 0.5]   [0.5 | 0.5, 0.5]   4 B from rank 0",
            ],
        ),
        (
            reduce_scatter,
            [
                "call 1: reduce_scatter_single(sum) int32[4] in group 'world' of ranks 0, 1",
                "  at LINE",
                "           before          after    gets",
                "  rank 0   [0, 1 | 2, 3]   [0, 2]   8 B from rank 1",
                "  rank 1   [0, 1 | 2, 3]   [4, 6]   8 B from rank 0",
            ],
        ),
        (
            all_to_all,
            [
                "call 1: all_to_all_single int64 in group 'world' of ranks 0, 1",
                "  at LINE",
                "           before      after      gets",
                "  rank 0   [0 | 1]     [0 | 10]   8 B from rank 1",
                "  rank 1   [10 | 11]   [1 | 11]   8 B from rank 0",
            ],
        ),
        (
            gather,
            [
                "call 1: gather float32[1] to rank 1 in group 'world' of ranks 0, 1",
                "  at LINE",
                "           before    after       gets",
                "  rank 0   [ | 0.]",
                "  rank 1   [ | 1.]   [0. | 1.]   4 B from rank 0",
            ],
        ),
        (
            message,
            [
                "call 1: send float32[1], tag 3, from rank 1 to rank 0 in group 'world'",
                "           before   after       gets              at",
                "  rank 1   [2.5]    unchanged                     LINE",
                "  rank 0   [0.]     [2.5]       4 B from rank 1   LINE",
            ],
        ),
        (barrier, ["call 1: barrier of 'set up' in group 'world' of ranks 0, 1", "  at LINE"]),
    ],
)
def test_a_call_reads_as(fn: Callable[[ec.World], None], lines: list[str]) -> None:
    assert text_of(fn).splitlines() == lines


def test_a_group_of_some_ranks_has_their_numbers_in_the_job() -> None:
    def main(world: ec.World) -> None:
        group = world.group.subgroup([1, 3])
        if group is not None:
            group.broadcast(torch.tensor([world.rank]), src=1)

    made, call = ec.step_through(main, 4)
    assert made.title == "subgroup 'world.1' of ranks 1, 3 in group 'world' of ranks 0, 1, 2, 3"
    assert call.title == "broadcast int64[1] from rank 3 in group 'world.1' of ranks 1, 3"
    assert call.after[1].values.tolist() == [3]
    assert (call.sent(3), call.received(1), call.nbytes) == (8, 8, 8)


def test_a_call_shows_itself_in_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    (call,) = ec.step_through(all_reduce, 2)
    html = call._repr_html_()
    assert "all_reduce(sum) float32[2] of &#x27;loss&#x27;" in html
    assert "<td" in html
    assert "[2., 1.]" in html
    ec.show(call)
    assert "8 B from rank 1" in capsys.readouterr().out
    assert repr(call).startswith("<SteppedCall 1: all_reduce(sum)")
