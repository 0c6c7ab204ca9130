"""With costs, the streams of the device are a clock: what it overlaps is a law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.testing.device import simulated_device
from echelon.testing.device.torch_module import DEVICE
from tests.device.compiler import needs_compiler
from tests.device.programs import part_of, rank_of

pytestmark = needs_compiler

NUM_UNITS = 12
TOLERANCE = 1.05
GATHERS = [0.5, 0.9, 1.5]  # of the forward of a unit, whose backward takes 2


class Product(torch.autograd.Function):
    """One operator in forward, and two in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient.mm(weight.t()), x.t().mm(gradient)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Product.apply(x, self.weight)
        return product


def times(costs: dict[str, float], *, replicas: int = 1, **options: Any) -> tuple[float, float]:
    """The time of the forward and of the backward of a step that is not the first.

    With ``replicas``, so many ranks have the same shards.
    """

    def cost(operation: str, nbytes: int) -> float:
        return {"mm": 1.0, **costs}.get(operation, 0.0) if nbytes > 32 else 0.0  # not of flags

    with simulated_device(costs=cost) as device, torch.device(DEVICE):
        blocks = nn.Sequential(*[Block() for _ in range(NUM_UNITS)])
        group = rank_of(4 * replicas)
        if replicas > 1:
            options["strategy"] = ec.Strategy.HYBRID_SHARD
            options["replicate"] = part_of(group, range(0, 4 * replicas, 4))
            group = part_of(group, range(4))
        model = ec.FSDP(
            blocks,
            group,
            units=ec.units.by_type(Block),
            min_num_params=0,
            **options,
        )
        for _ in range(3):
            start = device.finished_at()
            loss = model(torch.ones(2, 8)).sum()
            middle = device.finished_at(torch.accelerator.current_stream())
            loss.backward()
            end = device.finished_at()
        assert not device.report()
    return middle - start, end - middle


def of_gathers(gather: float, **options: Any) -> tuple[float, float]:
    return times({"_allgather_base": gather}, **options)


def optimum(first: float, exposed: float, compute: float) -> float:
    """The first is exposed; then the longer of two lines is busy; the last computes."""
    return first + (NUM_UNITS - 1) * max(compute, exposed) + compute


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_forward_that_prefetches_hides_all_gathers_but_the_first(
    gather: float, depth: int
) -> None:
    forward, _ = of_gathers(gather, forward_prefetch=depth)
    assert forward == pytest.approx(optimum(gather, gather, 1.0))


@pytest.mark.parametrize("gather", GATHERS)
def test_without_prefetch_a_forward_takes_the_sum_of_both(gather: float) -> None:
    forward, _ = of_gathers(gather, forward_prefetch=0)
    assert forward == pytest.approx(NUM_UNITS * (gather + 1.0))


@pytest.mark.parametrize("gather", GATHERS)
def test_by_default_a_backward_hides_all_gathers_but_the_first(gather: float) -> None:
    _, backward = of_gathers(gather)
    assert backward <= TOLERANCE * optimum(gather, gather, 2.0)


@pytest.mark.parametrize("reduction", GATHERS)
def test_by_default_a_backward_hides_all_reductions_but_the_last(reduction: float) -> None:
    _, backward = times({"_reduce_scatter_base": reduction})
    assert backward <= TOLERANCE * (NUM_UNITS * 2.0 + reduction)


@pytest.mark.parametrize("gather", GATHERS)
def test_by_default_a_forward_hides_all_gathers_but_the_first(gather: float) -> None:
    forward, _ = of_gathers(gather)
    assert forward <= TOLERANCE * optimum(gather, gather, 1.0)


@pytest.mark.parametrize("offload", ec.Offload)
def test_a_backward_hides_all_reductions_over_replicas_but_the_last(offload: ec.Offload) -> None:
    costs = {"_reduce_scatter_base": 0.5, "allreduce": 2.0}
    _, backward = times(costs, replicas=2, offload=offload)
    assert backward <= TOLERANCE * (NUM_UNITS * 2.0 + 0.5 + 2.0)
