"""What ran is measured, and what was to be expected follows from it."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import StateError
from echelon.pipeline.execute import Executor
from echelon.pipeline.schedules.ir import Action
from echelon.pipeline.schedules.simulate import Timeline
from tests.pipeline.models import batch, build, mse
from tests.worlds import run_world

FORWARD_S, BACKWARD_S = 0.006, 0.012


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return grad.clone()


class Sleeps(nn.Module):
    """Does nothing, for a known time."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x * self.w)  # type: ignore[no-untyped-call]
        return out


def sleeps(world: World, name: str, chunks: int) -> tuple[Timeline, float, list[float], Any]:
    stages = [Sleeps() for _ in range(world.size * chunks)]
    pipe = ec.Pipeline(stages, world.group, microbatches=8, schedule=name, loss_fn=mse)
    x = torch.ones(8, 2)
    pipe.step(x, target=x)
    with pipe.measure() as measured:
        pipe.step(x, target=x)
    planned = ec.pipeline.simulate(pipe.schedule, {"F": FORWARD_S, "B": BACKWARD_S})
    return measured.timeline, planned.makespan, measured.waited_s, measured.costs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_a_measured_step_overlaps_its_stages_and_is_no_shorter_than_planned(
    name: str, chunks: int
) -> None:
    for timeline, planned, waited_s, costs in ec.run(sleeps, 4, "processes", args=(name, chunks)):
        assert planned <= timeline.makespan
        # On a busy machine all sleeps are longer; together they still are what ran at once.
        in_turn = sum(step.end - step.start for rank in range(4) for step in timeline.of_rank(rank))
        assert timeline.makespan < in_turn / 1.5
        assert min(costs["F"]) >= FORWARD_S
        assert min(costs["B"]) >= BACKWARD_S
        assert costs["hop"] >= 0
        assert waited_s[-1] > FORWARD_S  # for the first microbatch


def every_rank_has_the_timeline_of_all(world: World) -> None:
    pipe = ec.Pipeline(
        build("plain", 2), world.group, microbatches=4, loss_fn=mse, schedule="zb-h1"
    )
    x, y = batch(8)
    pipe.step(x, target=y)
    with pipe.measure() as measured:
        pipe.step(x, target=y)
        pipe.eval_step(x, target=y)  # is no step of the schedule
    for rank, order in enumerate(pipe.schedule.orders):
        ran = [str(step.item) for step in measured.timeline.of_rank(rank)]
        assert ran == [str(item) for item in order]
    ends = {str(step.item): step.end for step in measured.timeline.steps}
    starts = {str(step.item): step.start for step in measured.timeline.steps}
    for i in range(4):  # what waits for a value does not begin before it is there
        assert starts[f"1F{i}"] >= ends[f"0F{i}"]
        assert starts[f"0I{i}"] >= ends[f"1I{i}"]
    assert min(measured.costs["I"]) > 0
    assert measured.simulation.schedule is pipe.schedule
    assert "measured" in ec.pipeline.to_page(measured.simulation, measured.timeline, unit="s")


def ranks_of_a_measurement(world: World) -> tuple[int, ...]:
    group = world.mesh(pp=2, dp=2)["pp"]
    pipe = ec.Pipeline(build("plain", 2), group, microbatches=2, loss_fn=mse)
    return pipe.measure().ranks


def test_a_measurement_knows_the_ranks_of_the_job_that_it_is_about() -> None:
    assert ec.run(ranks_of_a_measurement, 4) == [(0, 2), (1, 3), (0, 2), (1, 3)]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_every_rank_has_the_timeline_of_all(kind: str) -> None:
    run_world(kind, every_rank_has_the_timeline_of_all, 2)


def test_what_was_not_measured_is_not_given() -> None:
    def main(world: World) -> None:
        pipe = ec.Pipeline(build("plain", 2), world.group, microbatches=2, loss_fn=mse)
        measured = pipe.measure()
        with pytest.raises(StateError, match="leave the block"):
            measured.timeline  # noqa: B018
        with measured:
            pass
        with pytest.raises(StateError, match="no step of the pipeline ran"):
            measured.timeline  # noqa: B018
        with pytest.raises(KeyError, match="of the body"), pipe.measure() as failed:
            raise KeyError("of the body")
        with pytest.raises(StateError, match="leave the block"):
            failed.costs  # noqa: B018

    ec.run(main, 2)


def is_interrupted_before_it_waits(world: World) -> None:
    run_action = Executor._run_action

    def late(self: Executor, action: Action, run: Callable[[], None]) -> None:
        time.sleep(0.02 if str(action).startswith("0I") else 0.0)  # meanwhile the value comes
        run_action(self, action, run)

    Executor._run_action = late  # type: ignore[method-assign]
    every_rank_has_the_timeline_of_all(world)


@pytest.mark.slow
def test_a_computation_starts_when_its_value_is_there_however_late_the_wait_begins() -> None:
    ec.run(is_interrupted_before_it_waits, 2, "processes")
