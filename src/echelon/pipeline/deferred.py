"""Weight gradients of linear layers, put off until the schedule has time for them.

[Note: two halves of a backward]
The gradient of a linear layer's input is needed by the stage before; that of its weight by nobody
until the optimizer. While a stage *defers*, its linear layers compute the first and keep what the
second needs: their input and the gradient of their output. Everything else (biases, norms,
embeddings) is finished at once. Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2;
by layer, as in Megatron-LM, so the graph is walked once and is free after the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.streams import autocasts

__all__ = ["Deferred", "WeightGradients", "accumulate", "defer_linears"]

_Half = tuple[Tensor, Tensor, Tensor]  # weight, input, gradient of the output


@final
class Deferred:
    """The second half of one backward: calls of ``run`` give what is left to the weights."""

    def __init__(self) -> None:
        self._halves: list[_Half] = []

    def add(self, weight: Tensor, x: Tensor, grad: Tensor) -> None:
        """Keep what the gradient of ``weight`` needs."""
        self._halves.append((weight, x, grad))

    @torch.no_grad()
    def run(self, accumulate: Callable[[Tensor, Tensor], None]) -> None:
        """Make all gradients, and give them to ``accumulate`` with their weights."""
        halves, self._halves = self._halves, []
        halves.reverse()
        while halves:
            weight, x, grad = halves.pop()
            accumulate(weight, _weight_gradient(x, grad))


@final
class WeightGradients:
    """Whether the linear layers of one stage defer now, and to where."""

    def __init__(self) -> None:
        self.now: Deferred | None = None

    @contextmanager
    def deferred(self) -> Iterator[Deferred]:
        """A backward in the body leaves the gradients of weights to what this yields."""
        self.now = later = Deferred()
        try:
            yield later
        finally:
            self.now = None


def accumulate(param: Tensor, grad: Tensor) -> None:
    """Add a gradient as autograd does."""
    if param.grad is None:
        param.grad = grad
    else:
        param.grad += grad


def _weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward asks first whether the weight's gradient can wait."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, home: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Recomputation gives back another tensor than the parameter that was saved.
        ctx.weight, ctx.home = weight, home
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        if ctx.needs_input_grad[1]:
            if ctx.home.now is None:
                grad_weight = _weight_gradient(x, grad)
            else:
                ctx.home.now.add(ctx.weight, x, grad)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_x, grad_weight, grad_bias, None


def defer_linears(module: nn.Module, home: WeightGradients) -> int:
    """Let the linear layers in ``module`` defer to ``home``; how many there are.

    A layer whose class has a forward of its own is left alone, and so is a call whose weight is no
    parameter, or under autocast: their gradients are finished in the first half.
    """
    found = 0
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            vars(layer)["forward"] = _forward_of(layer, home)
            found += 1
    return found


def _forward_of(layer: nn.Linear, home: WeightGradients) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        weight = layer.weight
        simple = weight.is_leaf and not autocasts(x.device)
        if not (simple and torch.is_grad_enabled() and x.dim()):
            return F.linear(x, weight, layer.bias)
        output: Tensor = _Linear.apply(x, weight, layer.bias, home)  # type: ignore[no-untyped-call]
        return output

    return forward
