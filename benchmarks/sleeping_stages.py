"""Pipelines on simulated ranks whose stages sleep for a known time: measured and simulated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import echelon as ec
from echelon.pipeline import data_parallel, weight_gradients
from echelon.pipeline.schedules.families import FAMILIES

__all__ = ["Case", "cases", "measure"]

# Of each of F, I and W, over all stages of a rank. All ranks share one interpreter, which has to
# run 8 or 16 computations in that time: shorter sleeps would measure the interpreter.
UNIT_S = 0.08

# Stages on each rank, of every schedule that trains.
CHUNKS = {name: one.chunks or 2 for name, one in FAMILIES.items() if name != "forward-only"}


@dataclass(frozen=True)
class Case:
    """One schedule of one size."""

    name: str
    ranks: int
    microbatches: int


def cases(ranks: list[int], microbatches: list[int]) -> list[Case]:
    """All schedules that run in these sizes."""
    return [
        Case(name, p, m)
        for p in ranks
        for m in microbatches
        for name in CHUNKS
        if name != "dualpipe-v" or m >= 2 * p
    ]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad.clone(), None, None


class Sleeps(nn.Module):
    """Sleeps in forward, and in backward; ``_sleeping_weights`` adds what W takes.

    Args:
        splits: whether the weight gradient is deferred, and sleeps separately.

    Attributes:
        unit_s: of F, I and W.
    """

    def __init__(self, *, splits: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.unit_s, self._splits = 0.0, splits

    def forward(self, x: Tensor) -> Tensor:
        backward_s = self.unit_s if self._splits else 2 * self.unit_s
        output: Tensor = _Sleep.apply(self.linear(x), self.unit_s, backward_s)  # type: ignore[no-untyped-call]
        return output


@contextmanager
def _sleeping_weights(unit_s: float) -> Iterator[None]:
    """Layers that can defer take ``unit_s`` for the gradient of their weight: in a W or in a B."""
    made, added = weight_gradients.weight_gradient, weight_gradients.add_weight_gradient

    def slowly_made(x: Tensor, grad: Tensor) -> Tensor:
        time.sleep(unit_s)
        return made(x, grad)

    def slowly_added(weight: Tensor, x: Tensor, grad: Tensor) -> None:
        time.sleep(unit_s)
        added(weight, x, grad)

    with (
        patch.multiple(
            weight_gradients, weight_gradient=slowly_made, add_weight_gradient=slowly_added
        ),
        patch.object(data_parallel, "add_weight_gradient", slowly_added),
    ):
        yield


def _rank(world: ec.World, case: Case, unit_s: float) -> float:
    chunks = CHUNKS[case.name]
    count = case.ranks * chunks
    schedule = ec.pipeline.schedule(case.name, count, case.microbatches, case.ranks)
    splits = any(item.kind is ec.pipeline.Kind.W for order in schedule.orders for item in order)
    stages = [Sleeps(splits=splits) for _ in range(count)]
    pipe = ec.Pipeline(
        stages,
        world.group,
        microbatches=case.microbatches,
        schedule=schedule,
        loss_fn=lambda y, target: (y - target).square().mean(),
    )
    x = torch.ones(case.microbatches, 2)
    pipe.step(x, target=x)  # exchanges the forms of messages
    for stage in stages:
        stage.unit_s = unit_s
    with pipe.measure() as measured:
        pipe.step(x, target=x)
    return measured.timeline.makespan


def measure(case: Case) -> dict[str, Any]:
    """The time of a step, measured and simulated."""
    chunks = CHUNKS[case.name]
    unit_s = UNIT_S / chunks
    with _sleeping_weights(unit_s):
        measured = statistics.median(ec.run(_rank, case.ranks, args=(case, unit_s)))
    schedule = ec.pipeline.schedule(case.name, case.ranks * chunks, case.microbatches, case.ranks)
    simulated = ec.pipeline.simulate(
        schedule, {"F": unit_s, "B": 2 * unit_s, "I": unit_s, "W": unit_s}
    )
    return {
        "schedule": case.name,
        "ranks": case.ranks,
        "microbatches": case.microbatches,
        "measured_s": measured,
        "simulated_s": simulated.makespan,
        "bubble": simulated.span_bubble,
    }
