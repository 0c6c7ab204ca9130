"""The norm of gradients of which every rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import cast

import torch
from torch import Tensor

from echelon.checks import number
from echelon.comm.group import Group
from echelon.fsdp.storage import Storage
from echelon.modules.sharded_gradients import unmarked


def norm_over_shards(storages: Sequence[Storage], group: Group, norm_type: float) -> Tensor:
    """The norm of all gradients as of one vector: parts of shards, and whole ones counted once.

    Args:
        norm_type: at least 1; ``math.inf`` for the largest magnitude.

    Raises:
        ArgumentError: ``norm_type`` is below 1 or no number.
    """
    norm_type = number("norm_type", norm_type, 1.0, math.inf)
    dtype = reduce(torch.promote_types, [storage.dtype.to_real() for storage in storages])
    parts = _combined([one for one in storages if one.sharded], group, norm_type)
    wholes = _combined([one for one in storages if not one.sharded], group, norm_type)
    if math.isinf(norm_type):
        total = parts
        group.all_reduce(total, "max", label="norm of the gradients")
        return torch.maximum(total, wholes).to(dtype)
    total = parts**norm_type
    group.all_reduce(total, "sum", label="norm of the gradients")
    return ((total + wholes**norm_type) ** (1 / norm_type)).to(dtype)


def _combined(storages: Sequence[Storage], group: Group, norm_type: float) -> Tensor:
    """The norm of this rank's gradients, in float64."""
    grads = [
        unmarked(param.grad).detach()
        for storage in storages
        for param in storage.exposed
        if param.grad is not None and param.grad.numel()
    ]
    device = group.device
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Where the gradients are on the host, only their norms go to the device that communicates.
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(grads, norm_type)]).to(
        device
    )
    return cast(Tensor, torch.linalg.vector_norm(norms, norm_type))
