"""A model whose embedding is its head, and the same in stages by any plan of two ranks deep."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.pipeline.split_models import LENGTH, VOCABULARY, Block, Decoder, loss_fn

__all__ = ["CLOSE", "ROWS", "decoder", "plan", "tied_stages", "tokens_of"]

CLOSE = {"rtol": 1e-11, "atol": 1e-12}
ROWS = 4  # of a rank's batch


def plan(schedule: str, **options: Any) -> ec.Plan:
    """Two ranks deep, with as many stages as the schedule wants."""
    chunks = 1 if schedule in ("1f1b", "zb-h1") else 2
    return ec.Plan(pp=2, microbatches=3, schedule=schedule, chunks=chunks, **options)


def tokens_of(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Input and target of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens, target = torch.randint(VOCABULARY, (2, rows, LENGTH), generator=generator)
    return tokens, target


def decoder() -> nn.Module:
    """The same values each time."""
    torch.manual_seed(0)
    return Decoder().double()


def tied_stages(
    plan: ec.Plan, world: World, *, by_block: bool = False
) -> tuple[nn.Module, ec.Pipeline]:
    """The model, and the same in stages; at first only rank 0 has the values of what is tied.

    Args:
        by_block: whether shards are units of a block each.
    """
    plain = decoder()
    model = copy.deepcopy(plain)
    stages = ec.pipeline.split(model, plan.pp * plan.chunks)
    if world.rank:
        with torch.no_grad():
            model.head.weight.add_(world.rank)
    units = ec.units.by_type(Block) if by_block and plan.shard > 1 else None
    pipe = ec.parallelize(stages, plan, world, loss_fn=loss_fn, units=units)
    assert isinstance(pipe, ec.Pipeline)
    return plain, pipe
