"""Stages that are replicated or sharded train as one process does on all batches together."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.world.base import World
from tests.pipeline.models import batch, build, mse
from tests.worlds import run_world

ROWS, STEPS = 6, 2
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
WHOLE = ec.Strategy.FULL_SHARD
KEPT = ec.Strategy.SHARD_GRAD_OP


def plan(schedule: str, **options: Any) -> ec.Plan:
    chunks = 1 if schedule in ("1f1b", "zb-h1", "gpipe") else 2
    return ec.Plan(pp=2, microbatches=3, schedule=schedule, chunks=chunks, **options)


def trains(world: World, plan: ec.Plan, kind: str = "plain") -> None:
    """Two batches a step, accumulated; clipped; AdamW."""
    stages = build(kind, plan.pp * plan.chunks)
    model = nn.Sequential(*copy.deepcopy(stages))
    units = ec.units.by_type(nn.Linear) if plan.shard > 1 else None
    pipe = ec.parallelize(stages, plan, world, loss_fn=mse, units=units)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    reference = torch.optim.AdamW(model.parameters(), lr=0.05)
    lines = plan.dp * plan.shard  # of batches
    mine = slice(ROWS * (world.rank % lines), ROWS * (world.rank % lines + 1))
    for step in range(STEPS):
        for part in range(2):
            x, y = batch(lines * ROWS, 2 * step + part)
            loss = mse(model(x), y)
            loss.backward()
            found = pipe.step(
                x[mine], target=y[mine], finalize=part == 1, loss_everywhere=True
            )
            world.group.all_reduce(found, "mean")
            torch.testing.assert_close(found, loss.detach(), **CLOSE)
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(ec.clip_grad_norm_(pipe, 0.1), expected, **CLOSE)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        x, y = batch(lines * ROWS, step)
        found = pipe.eval_step(x, target=y, loss_everywhere=True)
        torch.testing.assert_close(found, mse(model(x), y).detach(), **CLOSE)
    state = pipe.state_dict()
    assert set(state) == {key for key in model.state_dict() if key.partition(".")[0] in pipe.stages}
    for key, value in state.items():
        torch.testing.assert_close(value, model.state_dict()[key], **CLOSE, msg=str((plan, key)))


PLANS = [
    plan("1f1b", dp=2),
    plan("interleaved", dp=2),
    plan("zb-h1", dp=2),
    plan("zb-v", dp=2, reduce_every="microbatch"),
    plan("1f1b", shard=2),
    plan("interleaved", shard=2, strategy=KEPT, window_nbytes=0),
    plan("zb-h1", shard=2, strategy=KEPT),
    plan("zb-v", shard=2, window_nbytes=1000),
    plan("zb-h1", shard=2, reduce_every="microbatch"),
    plan("interleaved", shard=2, reduce_every="microbatch", window_nbytes=0),
]


def trains_all(world: World, plans: list[ec.Plan]) -> None:
    for one in plans:
        try:
            trains(world, one)
        except BaseException as error:
            error.add_note(repr(one))
            raise


@pytest.mark.parametrize(
    ("world", "plans"),
    [("threads", PLANS), ("processes", PLANS[3:6]), ("gloo", PLANS[3:])],
)
def test_shared_stages_train_as_one_process_does(world: str, plans: list[ec.Plan]) -> None:
    run_world(world, trains_all, 4, (plans,))
