"""The techniques that are compared on a device: each puts itself around a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llama import Block
from torch import nn

import echelon as ec

__all__ = ["MIXED", "MIXED_OF_ECHELON", "Wrap", "fully_sharded", "sharded", "wrappers"]

Wrap = Callable[[nn.Module], nn.Module]  # puts a technique around a model

ALONE = "one process alone"
MIXED = ", float32 parts"
MIXED_OF_ECHELON = ec.MixedPrecision(compute=torch.bfloat16, reduce=torch.float32)


def sharded(model: nn.Module, group: ec.Group, **options: Any) -> ec.FSDP:
    """echelon's FSDP with one unit for each block."""
    rule = ec.units.by_type(Block)
    return ec.FSDP(model, group, units=rule, min_num_params=0, **options)


def fully_sharded(model: nn.Module, **options: Any) -> nn.Module:
    """PyTorch's FSDP2 with one unit for each block."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def flattened(model: nn.Module, device: torch.device) -> nn.Module:
    """PyTorch's first FSDP with one unit for each block."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=device
    )


def mixed_of_torch() -> Any:
    """bfloat16 in forward and backward, float32 everywhere else."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def data_parallel(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def wrappers(world: ec.World, device: torch.device) -> dict[str, Wrap]:
    """All techniques in a world of one rank, the most telling first."""
    group = world.group
    return {
        ALONE: lambda model: model,
        "echelon FSDP": lambda model: sharded(model, group),
        "echelon DDP": lambda model: ec.DDP(model, group),
        "PyTorch DDP": data_parallel,
        "FSDP2": lambda model: fully_sharded(model),
        "FSDP1": lambda model: flattened(model, device),
        "echelon FSDP, ZeRO-2": lambda model: sharded(
            model, group, strategy=ec.Strategy.SHARD_GRAD_OP
        ),
        f"echelon FSDP{MIXED}": lambda model: sharded(model, group, precision=MIXED_OF_ECHELON),
        f"FSDP2{MIXED}": lambda model: fully_sharded(model, mp_policy=mixed_of_torch()),
    }
