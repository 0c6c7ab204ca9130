"""Shards a model in a test, and puts what the ranks hold together again."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.fsdp.models import Block, build, loss_of
from tests.reference import assert_states_close

BLOCKS = ec.units.by_type(Block)


def shard(world: World, model: nn.Module | None = None, **options: Any) -> ec.FSDP:
    options = {"units": BLOCKS, "min_num_params": 0, **options}
    return ec.FSDP(build() if model is None else model, world.group, **options)


def plain_grads(*batches: tuple[Tensor, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    """The mean of the gradients of these batches."""
    model = build()
    for one in batches:
        (loss_of(model, *one) * scale / len(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole_grads(model: ec.FSDP, world: World) -> dict[str, Tensor]:
    """The gradients of all ranks, put together."""
    found = {}
    for name, param in model.named_parameters():
        if param.grad is None:
            continue
        parts = world.group.all_gather_object(ec.local_shard(param.grad).flatten().tolist())
        info = model.shard_info(name)
        if len(parts[0]) == math.prod(info[0].shape):
            parts = parts[:1]  # this one is whole, on every rank or on rank 0
        flat = [value for part in parts for value in part]
        found[name] = torch.tensor(flat, dtype=param.grad.dtype).view(info[0].shape)
    return found


def same_grads(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_states_close(found, expected, rtol=1e-11, atol=1e-12)
