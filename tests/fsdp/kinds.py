"""One small model under every kind of sharding that keeps or reduces gradients in another way."""

from typing import Any

import torch
from torch import nn

import echelon as ec

UNITS = {"units": ec.units.by_type(nn.Linear), "min_num_params": 0}
KINDS: dict[str, dict[str, Any]] = {
    "flat": UNITS,
    "rows": {**UNITS, "layout": "rows"},
    "flat parameters": {**UNITS, "use_orig_params": False},
    "zero 1": {**UNITS, "strategy": ec.Strategy.SHARD_OPTIMIZER},
    "zero 2": {**UNITS, "strategy": ec.Strategy.SHARD_GRAD_OP},
    "replicated": {**UNITS, "strategy": ec.Strategy.NO_SHARD},
    "small units": {},
    "some small units": {**UNITS, "min_num_params": 18},
    "offloaded": {**UNITS, "offload": ec.Offload.ALL},
    "summed wider": {**UNITS, "precision": ec.MixedPrecision(reduce=torch.float64)},
    "hybrid": {**UNITS, "strategy": ec.Strategy.HYBRID_SHARD},
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def wrapped(world: ec.World, name: str) -> ec.FSDP:
    options, group = dict(KINDS[name]), world.group
    if name == "hybrid":
        mesh = world.mesh(replicate=2, shard=2)
        options["replicate"], group = mesh["replicate"], mesh["shard"]
    return ec.FSDP(model(), group, **options)
