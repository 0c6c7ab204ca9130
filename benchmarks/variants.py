"""What is put around a model: one function for each variant that benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from models import UNITS
from peers import Peers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import echelon as ec
import echelon.c10d  # registers the backend "echelon"

__all__ = ["ALONE", "APART", "WRAPPERS"]

ALONE, APART = "one process alone", "all ranks, no communication"


def sharded(model: nn.Module, peers: Peers, strategy: ec.Strategy) -> nn.Module:
    """echelon's FSDP with one unit for each block."""
    rule = ec.units.by_type(*UNITS)
    return ec.FSDP(model, peers.group, units=rule, strategy=strategy, min_num_params=0)


def fully_sharded(
    model: nn.Module, mesh: DeviceMesh | None = None, *, reshard: bool = True
) -> nn.Module:
    """PyTorch's FSDP2 with one unit for each block."""
    for module in model.modules():
        if isinstance(module, UNITS):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


@cache
def mesh_over_shared_memory() -> DeviceMesh:
    """All ranks as a process group of the backend ``"echelon"``. All call it."""
    return DeviceMesh.from_group(dist.new_group(backend=echelon.c10d.BACKEND), "cpu")


def flattened(model: nn.Module) -> nn.Module:
    """PyTorch's first FSDP with one unit for each block."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(set(UNITS)),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


# With the settings that make each fastest.
WRAPPERS: dict[str, Callable[[nn.Module, Peers], nn.Module]] = {
    "echelon DDP": lambda model, peers: ec.DDP(model, peers.group),
    "PyTorch DDP": lambda model, peers: DistributedDataParallel(
        model, gradient_as_bucket_view=True
    ),
    "PyTorch DDP, static graph": lambda model, peers: DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True
    ),
    "echelon FSDP": lambda model, peers: sharded(model, peers, ec.Strategy.FULL_SHARD),
    "echelon FSDP, ZeRO-2": lambda model, peers: sharded(model, peers, ec.Strategy.SHARD_GRAD_OP),
    "FSDP2": lambda model, peers: fully_sharded(model),
    "FSDP2, no reshard": lambda model, peers: fully_sharded(model, reshard=False),
    "FSDP2 over echelon": lambda model, peers: fully_sharded(model, mesh_over_shared_memory()),
    "FSDP1": lambda model, peers: flattened(model),
    ALONE: lambda model, peers: model,
    APART: lambda model, peers: model,
}
