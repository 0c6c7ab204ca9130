"""A plan is refused at once if it says nothing, and otherwise reaches what it is for."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from tests.pipeline.models import batch, build, mse
from tests.worlds import run_world

ROWS = 6
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
KEPT = ec.Strategy.SHARD_GRAD_OP

TWO: dict[str, Any] = {"pp": 2, "microbatches": 2}

PP = {"pp": 2, "microbatches": 4}
THREE = ec.pipeline.schedule("1f1b", 3, 4, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dp": 0}, "dp is 0"),
        ({**PP, "pipeline": {"recompute": "x"}}, "recompute is 'x'; use one of True, False"),
        ({**PP, "pipeline": {"reduce_every": "x"}}, "reduce_every is 'x'; use one of"),
        ({**PP, "pipeline": {"window_nbytes": -1}}, "window_nbytes is -1; give a whole"),
        ({**PP, "schedule": THREE}, "3 ranks, 3 stages and 4 microbatches, and pp is 2"),
        ({"pp": 2}, "pp is 2 without microbatches"),
        ({"microbatches": 2}, "microbatches is 2, which is for pipelines"),
        ({"schedule": "1f1b"}, "schedule is '1f1b', which is for pipelines"),
        ({"chunks": 2}, "chunks is 2"),
        ({"pipeline": {"recompute": True}}, "pipeline is {'recompute': True}, which is for"),
        (
            {**TWO, "pipeline": {"recompte": True}},
            "no option of ec.Pipeline: it has loss_reduction",
        ),
        ({**TWO, "pipeline": {"loss_fn": mse}}, "pipeline has 'loss_fn': give it to parallelize"),
        ({**TWO, "pipeline": {"k": 1}}, "schedule '1f1b' has no option 'k'"),
        ({**TWO, "schedule": ec.pipeline.schedule("1f1b", 2, 2, 2), "pipeline": {"k": 1}}, "'k'"),
        ({**TWO, "schedule": "zb-v"}, "cannot spread 2 stages over 2 ranks"),
        ({**TWO, "dp": 2, "pipeline": {"materialize": mse}}, "give it in fsdp"),
        ({**TWO, "shard": 2, "fsdp": {"forward_prefetch": 1}}, "the schedule says when"),
        ({"fsdp": {"layout": "rows"}}, "shard is 1"),
        ({"shard": 2, "fsdp": {"layout": "columns"}}, "layout is 'columns'"),
        ({"shard": 2, "fsdp": {"ignored": []}}, "fsdp has 'ignored'"),
        ({"shard": 2, "fsdp": 4}, "fsdp is 4"),
        ({"shard": 2, "ddp": {"bucket_bytes": 1}}, "nothing is only replicated with shard=2"),
        ({"dp": 2, "ddp": {"bucket_bytes": -1}}, "bucket_bytes is -1"),
        ({"dp": 2, "ddp": {"buckets": 1}}, "no option of ec.DDP: it has bucket_bytes"),
        ({"strategy": KEPT}, "shard is 1"),
        ({"shard": 2, "strategy": "zero"}, "strategy is 'zero'"),
        ({"dp": 2, "shard": 2, "strategy": ec.Strategy.NO_SHARD}, "strategy is"),
    ],
)
def test_a_plan_that_says_nothing_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ec.Plan(**options)


def uses_options(world: World) -> None:
    """What a plan says reaches the pipeline and what its stages are."""
    x, y = batch(ROWS)
    options = {"loss_reduction": "sum", "factor": 1}
    stages = build("plain", 4)
    one = ec.Plan(
        pp=2,
        dp=2,
        microbatches=3,
        schedule="interleaved",
        chunks=2,
        pipeline=options,
        ddp={"bucket_bytes": 1, "first_bucket_bytes": 1},
    )
    pipe = ec.parallelize(copy.deepcopy(stages), one, world, loss_fn=lambda a, b: (a - b).sum())
    expected = (nn.Sequential(*stages)(x) - y).sum().detach()
    found = pipe.step(x, target=y, loss_everywhere=True)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert pipe.schedule == ec.pipeline.schedule("interleaved", 4, 3, 2, factor=1)
    assert all(len(stage.buckets) > 1 for stage in pipe.stages.values())
    sharded = ec.Plan(pp=2, shard=2, microbatches=3, fsdp={"min_num_params": 10**6})
    pipe = ec.parallelize(stages[:1] + stages[3:], sharded, world, loss_fn=mse)
    assert not any(unit.sharded for stage in pipe.stages.values() for unit in stage.units)


@pytest.mark.slow
def test_options_of_a_plan_are_those_of_what_it_makes() -> None:
    run_world("threads", uses_options, 4)
