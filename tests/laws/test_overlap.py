"""How much of its communication a step hides, in simulated time: streams that only add up costs.

Every stream, and the network of every communicator, has the time at which its work is over. A
module, a gather and a reduction take a given time on theirs; a wait is a maximum. So the length of
a forward or a step is exact, and that of an accelerator whose host is never late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm import streams
from echelon.comm.torch_dist.engines import Engine, NativeEngine
from echelon.comm.torch_dist.group import GroupSpec
from echelon.comm.torch_dist.job import Job
from echelon.comm.torch_dist.native import NativeGroup
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.fsdp import local_shard
from tests.rank_zero import fake_engine

UNITS = 12
SIZE = 8


class Clock:
    """The time at which the work of each line is over; ``current`` is the line of this thread."""

    def __init__(self) -> None:
        self.main = self.current = Line(self)


class Line(streams.Stream):
    """A stream."""

    queued = True

    def __init__(self, clock: Clock) -> None:
        self.clock, self.end = clock, 0.0

    @contextmanager
    def as_current(self) -> Iterator[None]:  # type: ignore[override]
        before, self.clock.current = self.clock.current, self
        yield
        self.clock.current = before

    def wait_for_current(self) -> None:
        self.end = max(self.end, self.clock.current.end)

    def record_event(self) -> streams.StreamEvent:
        return Moment(self.clock, self.end)


class Moment(streams.StreamEvent):
    """An event, and the end of a call of an engine."""

    def __init__(self, clock: Clock, end: float) -> None:
        self.clock, self.end = clock, end

    def wait(self, timeout: object = None) -> bool:  # type: ignore[override]
        self.clock.current.end = max(self.clock.current.end, self.end)
        return True

    def synchronize(self) -> None:
        pass  # the host is never late

    def query(self) -> bool:
        return True

    is_completed = query


class TimedEngine:
    """The ``fake`` engine, where each call takes a time on the network of its communicator."""

    def __init__(self, clock: Clock, costs: dict[str, float], rank: int, size: int) -> None:
        self._fake = fake_engine(rank, size)
        self.clock, self.costs, self.network = clock, costs, Line(clock)

    def __getattr__(self, name: str) -> Callable[..., Moment]:
        def call(*args: Any) -> Moment:
            getattr(self._fake, name)(*args)
            self.network.wait_for_current()
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            if name != "allreduce" or tensor.is_floating_point():  # not the flags
                self.network.end += self.costs.get(name, 0.0)
            return Moment(self.clock, self.network.end)

        return call


class Takes(torch.autograd.Function):
    """Takes a time on the current line, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.backward = clock, backward
        clock.current.end += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.current.end += ctx.backward
        return gradient, None, None, None


class Layer(nn.Module):
    """A unit, whose forward takes 1 and whose backward 2."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.weight, self.clock = nn.Parameter(torch.ones(64)), clock

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, Takes.apply(x * self.weight, self.clock, 1.0, 2.0))


def lengths_of_a_step(
    patch: pytest.MonkeyPatch, costs: dict[str, float], *, replicas: int = 1, **options: Any
) -> tuple[float, float]:
    """The times of a forward and of a backward, of the third step."""
    clock = Clock()
    patch.setattr(local_shard, "side_stream", lambda device: Line(clock))
    job = Job(torch.distributed.HashStore(), RankMonitor.alone(0))

    def connect(name: str, ranks: tuple[int, ...]) -> NativeGroup:
        spec = GroupSpec(job, name, ranks, torch.device("cpu"), 60.0, connect)
        engine = cast(Engine, TimedEngine(clock, costs, ranks.index(0), len(ranks)))
        return NativeGroup(spec, NativeEngine(engine, lambda failed: None))

    group = connect("world", tuple(range(SIZE)))
    if replicas > 1:
        options |= {"strategy": ec.Strategy.HYBRID_SHARD}
        options["replicate"] = connect("replicas", tuple(range(0, SIZE * replicas, SIZE)))
    layers = nn.Sequential(*(Layer(clock) for _ in range(UNITS)))
    model = ec.FSDP(
        layers,
        group,
        units=ec.units.by_type(Layer),
        min_num_params=0,
        check_replicas=0,
        init="trust",
        **options,
    )
    for _ in range(3):
        start = clock.main.end = max(clock.main.end, 0.0)
        loss = model(torch.ones(64)).sum()
        middle = clock.main.end
        loss.backward()
        end = clock.main.end
        for param in model.parameters():
            param.grad = None
    group.close()
    return middle - start, end - middle


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("gather", [0.5, 0.9, 1.5])
def test_forward_hides_its_gathers_by_default(
    gather: float, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, _ = lengths_of_a_step(monkeypatch, {"_allgather_base": gather}, layout=layout)
    optimum = gather + UNITS if gather < 1 else UNITS * gather + 1
    assert forward <= 1.05 * optimum


@pytest.mark.parametrize("cost", [0.5, 0.9, 1.5])
def test_backward_hides_gathers_and_reductions_by_default(
    cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"_allgather_base": cost, "_reduce_scatter_base": cost}
    _, backward = lengths_of_a_step(monkeypatch, costs)
    # Nothing comes before the first gather that it could hide behind, nor after the last reduction.
    assert backward <= 1.05 * (cost + 2 * UNITS + cost)


@pytest.mark.parametrize("offload", list(ec.Offload))
def test_backward_hides_the_reductions_over_replicas(
    offload: ec.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        local_shard, "has_two_memories", lambda offload, _: offload is not ec.Offload.NONE
    )
    costs = {"_allgather_base": 0.5, "_reduce_scatter_base": 0.5, "allreduce": 2.0}
    _, backward = lengths_of_a_step(monkeypatch, costs, replicas=2, offload=offload)
    assert backward <= 1.05 * (0.5 + 2 * UNITS + 0.5 + 2.0)
