"""The norm of all gradients of a model, taken as one vector, and clipping by it.

After a data-parallel backward every rank holds the same gradients, so the norm of the local ones
is the norm of the model, and no communication is needed. A model that is sharded or in stages
computes the norm of its gradients itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from echelon.checks import number
from echelon.errors import ArgumentError
from echelon.modules.norms import (
    LABEL,
    ReducingRanks,
    by_kind,
    check_order,
    local_norm,
    norms_over_ranks,
)
from echelon.modules.sharded_tensor import unmarked
from echelon.modules.stage_gradients import StageGradient


@runtime_checkable
class Sharded(Protocol):
    """A model whose gradients are distributed over ranks."""

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of all ranks; all ranks call it."""


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of ``model``, taken as one vector; a plain scalar tensor.

    Law: norms are combined in the order of ``model.parameters()``, so equal gradients give equal
    bits on every rank. A model without gradients has norm 0.
    """
    return local_norm(_gradients(model), check_order(norm_type))


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of ``model`` so that their norm is at most ``max_norm``.

    Args:
        max_norm: the bound; with ``math.inf`` the norm is only computed.
        norm_type: at least 1; ``math.inf`` for the largest magnitude.

    Returns:
        The norm before clipping, a plain scalar tensor. If it is not finite, no gradient is scaled,
        so that one can still see which of them are not finite; ``ec.FiniteGuard`` takes the norm.

    Raises:
        ArgumentError: ``max_norm`` is negative or not a number, ``norm_type`` is below 1, or a
            gradient is sparse.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[4.0]])
        >>> clip_grad_norm_(layer, max_norm=1.0).item()
        4.0
        >>> round(layer.weight.grad.item(), 4)
        1.0
    """
    max_norm = number("max_norm", max_norm, 0.0, math.inf)
    order = check_order(norm_type)
    gradients = _gradients(model)
    norm = model.grad_norm(order) if isinstance(model, Sharded) else local_norm(gradients, order)
    if math.isinf(max_norm):
        return norm
    # The small term, which torch adds too, prevents a division by zero.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).where(norm.isfinite(), 1.0)
    for kind in by_kind(gradients):
        torch._foreach_mul_([unmarked(gradient) for gradient in kind], scale.to(kind[0].device))
    return norm


def norm_over_stages(
    stages: Collection[nn.Module],
    shared: Mapping[nn.Parameter, bool],
    ranks: ReducingRanks,
    norm_type: float,
) -> Tensor:
    """The norm of all gradients of a model in ``stages``, each parameter counted once.

    All ranks call it. ``shared`` has the parameters that several stages share, and whether this
    rank counts each of them.
    """
    order = check_order(norm_type)
    norms = [stage.grad_norm(order) for stage in stages if isinstance(stage, Sharded)]
    plain = nn.ModuleList(stage for stage in stages if not isinstance(stage, Sharded))
    counted = [param for param in plain.parameters() if param not in shared]
    counted += [param for param, counts in shared.items() if counts]
    norms.append(grad_norm(nn.ParameterList(counted), order))
    parts = torch.stack([norm.double().to(ranks.device) for norm in norms])
    return norms_over_ranks(torch.linalg.vector_norm(parts, order), order, ranks, LABEL)


def _gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of ``model``, in the order of its parameters."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"norms are taken of a model, to know the ranks that share its gradients; "
            f"got {type(model).__name__}: give the wrapped model, not its parameters"
        )
    gradients = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.layout != torch.strided:
            raise ArgumentError(
                f"the gradient of {name} is {parameter.grad.layout}: build the layer without "
                "sparse=True, because norms are taken of dense gradients"
            )
        gradient = parameter.grad.detach()
        gradients.append(unmarked(gradient) if isinstance(gradient, StageGradient) else gradient)
    return gradients
