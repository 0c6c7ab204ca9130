"""A pipeline says how many bytes its rank holds, as FSDP does."""

import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from tests.pipeline.models import mse


def test_memory_stats_are_the_bytes_of_the_stages_of_a_rank() -> None:
    """Plain, and in FSDP, whose own categories are added up."""

    def main(world: World) -> None:
        chunks, shard = (2, 1) if world.size == 2 else (1, 2)
        schedule = "zb-v" if chunks == 2 else "1f1b"
        plan = ec.Plan(pp=2, shard=shard, chunks=chunks, schedule=schedule, microbatches=2)
        stages: list[nn.Module] = [nn.Linear(32, 32) for _ in range(2 * chunks)]
        pipe = ec.parallelize(stages, plan, world, loss_fn=mse)
        assert isinstance(pipe, ec.Pipeline)
        optimizer = torch.optim.Adam(pipe.parameters())
        pipe.step(torch.ones(4, 32), target=torch.ones(4, 32))
        optimizer.step()
        stats, nbytes = pipe.memory_stats(optimizer), 4 * (32 * 32 + 32)
        assert stats.total == sum(stats.by_category().values())
        assert pipe.memory_stats().optimizer is None
        if shard == 1:
            of_stage = {"parameters": nbytes, "buffers": 0, "gradients": nbytes}
            assert stats.stages == dict.fromkeys(stats.stages, of_stage)
            assert stats.optimizer == 2 * (2 * nbytes + 2 * 4)  # a step for each parameter
        else:
            assert nbytes // 2 <= stats.by_category()["shards"] < nbytes
            assert nbytes <= (stats.optimizer or 0) < 2 * nbytes

    for ranks in (2, 4):
        ec.run(main, ranks)
