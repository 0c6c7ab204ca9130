"""Gradients of a whole model as one thing: their norm, and its bound.

After a data-parallel backward every rank holds the same gradients, so the norm of the local ones
is the norm of the model, and no communication is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from echelon.checks import number
from echelon.errors import ArgumentError
from echelon.modules.sharded_gradients import unmarked


@runtime_checkable
class Sharded(Protocol):
    """A model of whose gradients every rank holds a part."""

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all of them; all ranks call it."""


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of ``model`` as of one vector; a plain scalar tensor.

    Law: parts are combined in the order of ``model.parameters()``, so equal gradients give equal
    bits on every rank. A model without gradients has norm 0.

    Args:
        norm_type: at least 1; ``math.inf`` for the largest magnitude.

    Raises:
        ArgumentError: ``norm_type`` is below 1 or no number, or a gradient is sparse.
    """
    norm_type = number("norm_type", norm_type, 1.0, math.inf)
    return _norm(_gradients(model), norm_type)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of ``model`` so that their norm is at most ``max_norm``.

    Args:
        max_norm: the bound; ``math.inf`` only measures.
        norm_type: at least 1; ``math.inf`` for the largest magnitude.

    Returns:
        the norm before clipping, a plain scalar tensor. Where it is not finite nothing is scaled,
        so that one can still see which gradients are not; ``ec.FiniteGuard`` takes it.

    Raises:
        ArgumentError: ``max_norm`` is negative or no number, ``norm_type`` is below 1, or a
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
    norm_type = number("norm_type", norm_type, 1.0, math.inf)
    gradients = _gradients(model)
    norm = model.grad_norm(norm_type) if isinstance(model, Sharded) else _norm(gradients, norm_type)
    if math.isinf(max_norm):
        return norm
    # The small term keeps a norm of zero from dividing by zero; it is torch's own.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).where(norm.isfinite(), 1.0)
    for parts in by_kind(gradients):
        torch._foreach_mul_([unmarked(one) for one in parts], scale.to(parts[0].device))
    return norm


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
        gradients.append(parameter.grad.detach())
    return gradients


def _norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    if not gradients:
        return torch.zeros(())
    home = gradients[0].device
    parts = [
        norm.to(home)
        for kind in by_kind(gradients)
        for norm in torch._foreach_norm(kind, norm_type)
    ]
    # Parts of several dtypes are combined in the widest of them.
    widest = parts[0].dtype
    for part in parts:
        widest = torch.promote_types(widest, part.dtype)
    norms = torch.stack([part.to(widest) for part in parts])
    return cast(Tensor, torch.linalg.vector_norm(norms, norm_type))


def by_kind(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Gradients that one fused call can take, in order of first appearance."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(kinds.values())
