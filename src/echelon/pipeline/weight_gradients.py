"""Gradients of large weights: added to ``.grad`` where they are computed, or deferred.

[Note: two halves of a backward]
The previous stage needs the gradient of a linear layer's input, but only the optimizer needs that
of its weight. While a stage *defers*, its linear layers compute the first and keep their input and
the gradient of their output for the second. Everything else (biases, norms, embeddings) is finished
at once. Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2;
by layer, as in Megatron-LM, so the graph is walked once and is free after the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.comm.streams import autocasts, device_of
from echelon.modules.autograd import (
    add_row_gradients,
    add_weight_gradient,
    weight_gradient,
    will_accumulate_from,
)
from echelon.modules.deferred_hooks import wait_for_step

# For smaller weights a call of Python costs more than the addition in place saves.
_MIN_NUMEL = 1 << 16
_WEIGHT = 1  # its place among the inputs of both functions
_PLAIN = (Tensor, nn.Parameter)


@final
class DeferredGradients:
    """The gradients of weights that the first half of a backward leaves to the second."""

    def __init__(self) -> None:
        self._factors: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, weight: Tensor, x: Tensor, grad: Tensor) -> None:
        """Keep the factors of the gradient of ``weight``."""
        self._factors.append((weight, x, grad))

    @torch.no_grad()
    def run(self, add: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """Call ``add(weight, x, grad)`` for all gradients, and free each after its call."""
        factors, self._factors = self._factors, []
        factors.reverse()
        while factors:
            add(*factors.pop())


@final
class WeightGradients:
    """Handles the gradients of weights of one stage.

    If they are local, only the optimizer needs them, so they may be added to ``.grad`` without
    autograd. See [Note: accumulation in place] in ``modules.autograd``. A forward that is computed
    again in the backward may call ``torch.autograd.grad``, whose gradients stay with autograd.
    """

    def __init__(self, *, is_local: bool) -> None:
        self._is_local = is_local
        self._adds = False  # whether a backward of this stage runs
        self._deferred: DeferredGradients | None = None

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Backwards in the block add gradients to ``.grad``."""
        self._adds = self._is_local
        try:
            yield
        finally:
            self._adds = False

    @contextmanager
    def deferring(self) -> Iterator[DeferredGradients]:
        """Backwards in the block leave gradients of linear weights to the ``DeferredGradients``."""
        self._deferred = deferred = DeferredGradients()
        try:
            with self.adding():
                yield deferred
        finally:
            self._deferred = None

    def linear(self, node: Any, weight: Tensor, x: Tensor, grad: Tensor) -> Tensor | None:
        """The gradient of a linear layer's weight for autograd; None if it was added or deferred.

        ``node`` is that of the layer in the graph, ``x`` its input (..., in), and ``grad`` the
        gradient of its output (..., out).
        """
        if self._deferred is not None and self._may_take(node, weight):
            self._deferred.add(weight, x, grad)
            return None
        if self._may_add(node, weight):
            add_weight_gradient(weight, x, grad)
            return None
        return weight_gradient(x, grad)

    def embedding(self, node: Any, weight: Tensor, index: Tensor, grad: Tensor) -> bool:
        """Add the gradient of looked-up rows of ``weight`` and return true, if that is allowed."""
        if not (device_of(weight.device).adds_in_order and self._may_add(node, weight)):
            return False
        add_row_gradients(weight, index, grad)
        return True

    def _may_add(self, node: Any, weight: Tensor) -> bool:
        return self._adds and weight.grad is not None and self._may_take(node, weight)

    def _may_take(self, node: Any, weight: Tensor) -> bool:
        return not self._has_hooks(weight) and will_accumulate_from(node, _WEIGHT)

    def _has_hooks(self, weight: Tensor) -> bool:
        """Whether the user has a hook on its gradient, which must then go through autograd."""
        hooks = weight._post_accumulate_grad_hooks
        # DDP and FSDP have such hooks too, but they get the gradients in another way, except those
        # of parameters that they ignore.
        has_user_hooks = hooks and (self._is_local or wait_for_step(hooks))
        return bool(weight._backward_hooks or has_user_hooks)


def patch_layers(module: nn.Module, weights: WeightGradients, *, all_sizes: bool) -> None:
    """Let linear and embedding layers in ``module`` give the gradients of weights to ``weights``.

    Autograd handles layers with a forward of their own, of their class or their instance, layers
    of complex numbers, and calls whose weight is not a parameter, on subclasses of tensors, under
    autocast, and inside of transforms and compiled graphs. Unless ``all_sizes``, it also handles
    linear layers with small weights.
    """
    for layer in module.modules():
        forward = type(layer).forward
        if _has_foreign_forward(layer):
            continue
        # No closures: a copy of the layer uses its own weight, and it can be pickled.
        if forward is nn.Linear.forward:
            assert isinstance(layer, nn.Linear)
            weight = layer._parameters.get("weight")
            if weight is None:
                continue  # the weight is computed at each call, as by weight_norm
            is_small = not all_sizes and weight.numel() < _MIN_NUMEL
            if not is_small and weight.is_floating_point():
                vars(layer)["forward"] = partial(_linear, layer, weights)
        elif forward is nn.Embedding.forward:
            assert isinstance(layer, nn.Embedding)
            weight = layer._parameters.get("weight")
            if weight is not None and weight.numel() >= _MIN_NUMEL and _has_defaults(layer):
                vars(layer)["forward"] = partial(_embedding, layer, weights)


def _has_foreign_forward(layer: nn.Module) -> bool:
    """Whether somebody other than a pipeline gave this layer a forward."""
    forward = vars(layer).get("forward")
    is_ours = isinstance(forward, partial) and forward.func in (_linear, _embedding)
    return forward is not None and not is_ours


def _has_defaults(layer: nn.Embedding) -> bool:
    options = layer.sparse, layer.scale_grad_by_freq, layer.max_norm, layer.padding_idx
    return options == (False, False, None, None)


def _applies(weight: Tensor, x: Tensor) -> bool:
    return (
        type(x) in _PLAIN
        and type(weight) in _PLAIN
        and weight.is_leaf
        and weight.requires_grad
        and torch.is_grad_enabled()
        and x.dim() > 0
        and not autocasts(x.device)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


# --- linear ------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward gives the weight's gradient to its stage."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weights: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Recomputation gives back another tensor than the parameter that was saved.
        ctx.weight, ctx.weights = weight, weights
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        grad_weight = ctx.weights.linear(ctx, ctx.weight, x, grad)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_x, grad_weight, grad_bias, None


# The layers of torch call the argument ``input``.
def _linear(layer: nn.Linear, weights: WeightGradients, input: Tensor) -> Tensor:
    weight = layer.weight
    if not _applies(weight, input):
        return F.linear(input, weight, layer.bias)
    output: Tensor = _Linear.apply(input, weight, layer.bias, weights)  # type: ignore[no-untyped-call]
    return output


# --- embedding ---------------------------------------------------------------------------------


class _Embedding(torch.autograd.Function):
    """``F.embedding`` whose backward gives the weight's gradient to its stage."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, weights: WeightGradients) -> Tensor:
        ctx.save_for_backward(index)
        ctx.weight, ctx.weights = weight, weights
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        weight = ctx.weight
        if ctx.weights.embedding(ctx, weight, index, grad):
            return None, None, None
        full = torch.ops.aten.embedding_dense_backward(grad, index, len(weight), -1, False)
        return None, full, None


def _embedding(layer: nn.Embedding, weights: WeightGradients, input: Tensor) -> Tensor:
    weight = layer.weight
    if not _applies(weight, input):
        return F.embedding(input, weight)
    output: Tensor = _Embedding.apply(input, weight, weights)  # type: ignore[no-untyped-call]
    return output
