"""Linear and embedding layers that ask their stage what becomes of the gradient of their weight."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.comm.streams import autocasts
from echelon.pipeline.deferred import WeightGradients

# Below that, what a step saves by it is less than what a call of Python costs.
_LARGE = 1 << 16  # elements
_PLAIN = (Tensor, nn.Parameter)


def take_over(module: nn.Module, home: WeightGradients, *, every: bool) -> None:
    """Let the layers in ``module`` ask ``home``.

    A layer that has a forward of its own, by its class or by itself, is left alone, and so is one
    of complex numbers and a call whose weight is no parameter, on a subclass of tensors, under
    autocast, or inside of a transform or a compiled graph: autograd does the rest.

    Args:
        every: linear layers with small weights, too.
    """
    for layer in module.modules():
        forward = type(layer).forward
        if _is_patched(layer):
            continue
        # No closures: a copy of the layer asks for its own weight, and it can be pickled.
        if forward is nn.Linear.forward:
            assert isinstance(layer, nn.Linear)
            weight = layer._parameters.get("weight")
            if weight is None:
                continue  # it is computed at each call, as by weight_norm
            small = not every and weight.numel() < _LARGE
            if not small and weight.is_floating_point():
                vars(layer)["forward"] = partial(_linear, layer, home)
        elif forward is nn.Embedding.forward:
            assert isinstance(layer, nn.Embedding)
            weight = layer._parameters.get("weight")
            if weight is not None and weight.numel() >= _LARGE and _is_plain(layer):
                vars(layer)["forward"] = partial(_embedding, layer, home)


def _is_patched(layer: nn.Module) -> bool:
    """Whether somebody gave this layer a forward, who is not a pipeline."""
    own = vars(layer).get("forward")
    ours = isinstance(own, partial) and own.func in (_linear, _embedding)
    return own is not None and not ours


def _is_plain(layer: nn.Embedding) -> bool:
    unusual = layer.sparse, layer.scale_grad_by_freq, layer.max_norm, layer.padding_idx
    return unusual == (False, False, None, None)


def _may_ask(weight: Tensor, x: Tensor) -> bool:
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
    """``F.linear`` whose backward leaves the weight's gradient to its stage."""

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
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        grad_weight = ctx.home.linear(ctx.weight, x, grad)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_x, grad_weight, grad_bias, None


# ``input`` is what the layers of torch call it.
def _linear(layer: nn.Linear, home: WeightGradients, input: Tensor) -> Tensor:
    weight = layer.weight
    if not _may_ask(weight, input):
        return F.linear(input, weight, layer.bias)
    output: Tensor = _Linear.apply(input, weight, layer.bias, home)  # type: ignore[no-untyped-call]
    return output


# --- embedding ---------------------------------------------------------------------------------


class _Embedding(torch.autograd.Function):
    """``F.embedding`` whose backward leaves the weight's gradient to its stage."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, home: WeightGradients) -> Tensor:
        ctx.save_for_backward(index)
        ctx.weight, ctx.home = weight, home
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        weight = ctx.weight
        if ctx.home.embedding(weight, index, grad):
            return None, None, None
        whole = torch.ops.aten.embedding_dense_backward(grad, index, len(weight), -1, False)
        return None, whole, None


def _embedding(layer: nn.Embedding, home: WeightGradients, input: Tensor) -> Tensor:
    weight = layer.weight
    if not _may_ask(weight, input):
        return F.embedding(input, weight)
    output: Tensor = _Embedding.apply(input, weight, home)  # type: ignore[no-untyped-call]
    return output
