"""What a model holds now, by category, also while its units are gathered."""

from __future__ import annotations

from collections import Counter

import torch
from wrap import Shared

import echelon as ec


def held_bytes(model: Shared, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes on this rank of parameters, gradients and the optimizer's state.

    Of an ``FSDP`` only the model itself knows which parameters are gathered; stages of a plan may
    be several.
    """
    sharded = [module for module in model.modules() if isinstance(module, ec.FSDP)]
    if not sharded:
        return ec.observe.tensor_bytes(model, optimizer)
    nbytes: Counter[str] = Counter()
    for module in sharded:
        nbytes.update(module.memory_stats().by_category())
    state = ec.observe.tensor_bytes(model, optimizer)["optimizer state"]
    return {**nbytes, "optimizer": state}
