"""Law *Parity* for pipelines: every schedule trains as one process does, as it was simulated."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.comm.world import World
from echelon.pipeline.schedules.passes import add_transfers
from tests.pipeline.models import batch, build, mse, train_plain
from tests.pipeline.sizes import TRAINING, VARIANTS, make, pipeline
from tests.worlds import NCCL_RULES, run_world

STEPS = 2


def train(
    world: World, variant: str, kind: str, rows: int, microbatches: int
) -> tuple[list[float], dict[int, list[torch.Tensor]], int]:
    stages = build(kind, world.size * VARIANTS[variant][1])
    pipe = pipeline(variant, stages, world.group, microbatches, mse)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    losses, alive = [], 0
    for step in range(STEPS):
        x, y = batch(rows, step)
        is_first, is_last = 0 in pipe.schedule.stages_of(world.rank), pipe.has_loss
        loss = pipe.step(*([x] if is_first else []), target=y if is_last else None)
        assert (loss is not None) == is_last
        optimizer.step()
        optimizer.zero_grad()
        alive = max(alive, pipe.most_alive)
        losses.append(0.0 if loss is None else loss.item())
    found = {int(index): list(stage.parameters()) for index, stage in pipe.stages.items()}
    return losses, found, alive


def train_all(world: World, cases: list[tuple[str, str, int, int]]) -> list[Any]:
    return [train(world, *case) for case in cases]


@cache
def trained_alone(kind: str, num_stages: int, rows: int) -> tuple[list[float], list[torch.Tensor]]:
    """What one process gives: several schedules have as many stages."""
    return train_plain(build(kind, num_stages), rows, STEPS)


def compare(world_size: int, case: tuple[str, str, int, int], found: list[Any]) -> None:
    variant, kind, rows, microbatches = case
    chunks = VARIANTS[variant][1]
    losses, params = trained_alone(kind, world_size * chunks, rows)
    totals = [sum(of_rank[0][step] for of_rank in found) for step in range(STEPS)]
    torch.testing.assert_close(totals, losses, rtol=1e-12, atol=1e-12)
    by_stage = {index: own for of_rank in found for index, own in of_rank[1].items()}
    everything = [param for index in sorted(by_stage) for param in by_stage[index]]
    assert len(everything) == len(params)
    for param, expected in zip(everything, params, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-11, atol=1e-12, msg=str(case))
    # What was alive is what the simulation says.
    schedule = make(variant, world_size, microbatches)
    peak = [round(one * chunks) for one in ec.pipeline.simulate(schedule).peak]
    assert [of_rank[2] for of_rank in found] == peak, case


def cases_of(
    variants: Iterable[str], kinds: list[str], microbatches: int
) -> list[tuple[str, str, int, int]]:
    rows = 2 * microbatches + 1
    return [(v, kinds[i % len(kinds)], rows, microbatches) for i, v in enumerate(variants)]


def check(world: str, ranks: int, cases: list[tuple[str, str, int, int]]) -> None:
    by_rank = run_world(world, train_all, ranks, (cases,))
    for i, case in enumerate(cases):
        compare(ranks, case, [results[i] for results in by_rank])


@pytest.mark.slow_for("3", "4")
@pytest.mark.parametrize(
    ("world", "ranks", "microbatches", "kinds"),
    [
        ("threads", 2, 5, ["nested", "plain"]),
        ("threads", 3, 7, ["plain", "nested"]),
        ("threads", 4, 8, ["plain"]),
        ("processes", 2, 4, ["plain", "nested"]),
        ("processes", 3, 6, ["nested"]),
        ("gloo", 2, 4, ["nested", "plain"]),
        ("gloo", 3, 6, ["plain"]),
        (NCCL_RULES, 2, 5, ["plain", "nested"]),
        (NCCL_RULES, 4, 8, ["nested", "plain"]),
    ],
)
def test_every_schedule_trains_as_one_process_does(world, ranks, microbatches, kinds) -> None:
    # Three processes cost more than they tell after two: every other schedule.
    variants = TRAINING[:: 2 if world in ("processes", "gloo") and ranks == 3 else 1]
    check(world, ranks, cases_of(variants, kinds, microbatches))


@pytest.mark.slow
def test_eight_ranks_train_as_one_process_does() -> None:
    """One schedule of each shape: on a line, in a loop, in a V. All of it is under one lock."""
    check("threads", 8, cases_of(["1f1b", "interleaved-v2", "zb-v"], ["plain"], microbatches=8))


def test_simulated_ranks_lower_a_schedule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is most of the time that a pipeline of many simulated ranks takes to be made."""
    lowered = []

    def counted(schedule: ec.pipeline.Schedule, *args: Any, **options: Any) -> ec.pipeline.Schedule:
        lowered.append(schedule.name)
        return add_transfers(schedule, *args, **options)

    monkeypatch.setattr("echelon.pipeline.schedules.passes.add_transfers", counted)

    def main(world: World) -> None:
        ec.Pipeline(build("plain", 4), world.group, microbatches=17, loss_fn=mse)

    ec.run(main, 4)
    assert lowered == ["1f1b"]
