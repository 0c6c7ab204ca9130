"""The norm of the gradients of a model in stages, of which each rank has some."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from echelon.checks import number
from echelon.comm.group import Group
from echelon.train.gradient_norm import Sharded, grad_norm


def norm_over_stages(
    stages: Collection[nn.Module],
    shared: Mapping[nn.Parameter, bool],
    group: Group,
    norm_type: float,
) -> Tensor:
    """The norm of all gradients as of one vector, each parameter counted once. All ranks call it.

    Args:
        stages: of this rank. Those that are sharded know their own norm.
        shared: parameters of theirs that several stages have, and whether this rank counts it.
        group: the ranks of all stages.
        norm_type: at least 1; ``math.inf`` for the largest magnitude.

    Raises:
        ArgumentError: ``norm_type`` is below 1 or no number.
    """
    norm_type = number("norm_type", norm_type, 1.0, math.inf)
    norm = _own_norm(stages, shared, group, norm_type)
    if math.isinf(norm_type):
        group.all_reduce(norm, "max", label="norm of the gradients")
        return norm
    total = norm**norm_type
    group.all_reduce(total, "sum", label="norm of the gradients")
    return total ** (1 / norm_type)


def _own_norm(
    stages: Collection[nn.Module],
    shared: Mapping[nn.Parameter, bool],
    group: Group,
    norm_type: float,
) -> Tensor:
    norms = [stage.grad_norm(norm_type) for stage in stages if isinstance(stage, Sharded)]
    plain = nn.ModuleList(stage for stage in stages if not isinstance(stage, Sharded))
    counted = [param for param in plain.parameters() if param not in shared]
    counted += [param for param, counts in shared.items() if counts]
    norms.append(grad_norm(nn.ParameterList(counted), norm_type))
    together = torch.stack([norm.double().to(group.device) for norm in norms])
    return cast(Tensor, torch.linalg.vector_norm(together, norm_type))
