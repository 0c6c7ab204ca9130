"""What crosses a boundary may change from step to step, and takes few messages."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.pipeline.packed_message import MAX_PACKED_NBYTES
from tests.worlds import NCCL_RULES, run_world


class Changes(nn.Module):
    """Gives something else in each step: a large tensor, small ones, another nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))
        self.step = 0

    def forward(self, x: Tensor) -> Any:
        x = x * self.w
        wide = x.expand(-1, MAX_PACKED_NBYTES // 4)  # large with one more row
        values = ([x, wide], [x, 1], [x, True], [wide, x, x], [wide, x, x], [x, wide])
        return {"all": values[self.step]}


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def forward(self, value: Any) -> Tensor:
        self.seen.append([type(one).__name__ for one in value["all"]])
        first, *rest = (one for one in value["all"] if isinstance(one, Tensor))
        total: Tensor = first.sum(-1) + sum(one.sum(-1) for one in rest)
        return total


def changes(world: World) -> tuple[int, list[float], list[list[str]]]:
    first, last = Changes(), Sums()
    pipe = ec.Pipeline([first, last], world.group, microbatches=2, loss_fn=lambda y, _: y.mean())
    sent = []
    grads = []
    for first.step in range(6):
        with ec.events.listen(sent.append):
            pipe.step(torch.ones(8, 1), target=torch.ones(8))
        grads.append(0.0 if first.w.grad is None else first.w.grad.item())
        first.w.grad = None
    mine = [e for e in sent if e.name == "collective.issue" and e.facts["rank"] == world.rank]
    return sum(e.facts["op"] == "send" for e in mine), grads, last.seen


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_what_stages_send_may_change_from_step_to_step(kind: str) -> None:
    (num_sent, *_), _ = check_changes(kind)
    # By microbatch: head, form, packet where it is new; what was announced before; large ones.
    new, large = 3, 1
    assert num_sent == 2 * (
        (new + large) + (new + large) + new + (new + large) + (1 + large) + (new + 2 * large)
    )


def test_what_stages_send_may_change_in_each_step_without_tags() -> None:
    check_changes(NCCL_RULES)


def check_changes(kind: str) -> list[tuple[int, list[float], list[list[str]]]]:
    by_rank = run_world(kind, changes, 2)
    (_, grads, _), (_, _, seen) = by_rank
    n = MAX_PACKED_NBYTES // 4
    assert grads == [1.0 + n, 1.0, 1.0, n + 2.0, n + 2.0, n + 1.0]
    assert [seen[2 * i] for i in range(4)] == [
        ["Tensor", "Tensor"],
        ["Tensor", "int"],
        ["Tensor", "bool"],
        ["Tensor"] * 3,
    ]
    return by_rank
