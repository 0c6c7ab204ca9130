"""What a cell does one after another: each operation with the parameters that it makes and uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

VOCABULARY = 5

Spec = dict[str, Any]


def used(cell: nn.Module, name: str, op: Spec) -> Tensor:
    """A parameter, in the way in which this operation uses it."""
    param, use = getattr(cell, name), op.get("use", "plain")
    if use == "detach":
        return param.detach()
    if use == "no_grad":
        with torch.no_grad():
            return param * 1
    if use == "twice":
        return param * 0.5 + param * 0.5
    if use == "half":
        return (param + param.detach()) / 2
    if use == "view":
        return param.view(-1).view(param.shape)
    return param


def freeze(module: nn.Module, op: Spec) -> None:
    frozen = op.get("frozen")
    for name, param in module.named_parameters():
        if frozen is True or (isinstance(frozen, str) and frozen in name):
            param.requires_grad_(False)


Make = Callable[[nn.Module, str, Spec, Any], None]
Apply = Callable[[nn.Module, str, Spec, Tensor], Tensor]


def _own(shape: Callable[[int, Spec], tuple[int, ...]], low: float, high: float) -> Make:
    def make(cell: nn.Module, name: str, op: Spec, builder: Any) -> None:
        value = builder.parameter(op, shape(builder.width, op), low, high)
        setattr(cell, name, value)

    return make


def _layer(new: Callable[[int, Spec], nn.Module]) -> Make:
    def make(cell: nn.Module, name: str, op: Spec, builder: Any) -> None:
        layer = builder.fill(new(builder.width, op))
        freeze(layer, op)
        setattr(cell, name, layer)

    return make


def _low_rank(cell: nn.Module, name: str, op: Spec, builder: Any) -> None:
    rank = op.get("size", 2)
    setattr(cell, name, builder.parameter(op, (rank, builder.width), -0.7, 0.7))
    other = {"frozen": op.get("frozen_b", False)}
    setattr(cell, f"{name}b", builder.parameter(other, (builder.width, rank), -0.7, 0.7))


def _buffer(cell: nn.Module, name: str, op: Spec, builder: Any) -> None:
    cell.register_buffer(name, builder.uniform((builder.width,), 0.5, 1.5), persistent=True)


def _normalised(width: int, op: Spec) -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(width, width))


def _rows(cell: nn.Module, name: str, op: Spec, x: Tensor) -> Tensor:
    layer = getattr(cell, name)
    return layer(cell.context.tokens[: x.shape[0]]).to(x.dtype) + x


def _attention(cell: nn.Module, name: str, op: Spec, x: Tensor) -> Tensor:
    rows = x.unsqueeze(0)
    return x + getattr(cell, name)(rows, rows, rows, need_weights=False)[0][0]


def _buffered(cell: nn.Module, name: str, op: Spec, x: Tensor) -> Tensor:
    buffer = getattr(cell, name)
    y = x * buffer
    if cell.training and op.get("moves"):
        with torch.no_grad():
            setattr(cell, name, buffer * 0.9 + 0.1 * x.detach().mean(0))
    return y


def _complex(cell: nn.Module, name: str, op: Spec, x: Tensor) -> Tensor:
    y = x * used(cell, name, op)
    return y.real + 0.5 * y.imag if y.is_complex() else y


Op = tuple[Make | None, Apply]

OPS: dict[str, Op] = {
    "scale": (_own(lambda w, op: (w,), 0.5, 1.5), lambda c, n, op, x: x * used(c, n, op)),
    "gain": (_own(lambda w, op: (), 0.5, 1.5), lambda c, n, op, x: x * used(c, n, op)),
    "single": (_own(lambda w, op: (1,), 0.5, 1.5), lambda c, n, op, x: x * used(c, n, op)),
    "row": (_own(lambda w, op: (1, w), 0.5, 1.5), lambda c, n, op, x: x * used(c, n, op)),
    "shift": (_own(lambda w, op: (w,), -0.5, 0.5), lambda c, n, op, x: x + used(c, n, op)),
    "matrix": (_own(lambda w, op: (w, w), -0.6, 0.6), lambda c, n, op, x: x @ used(c, n, op)),
    "affine": (
        _own(lambda w, op: (w, w), -0.6, 0.6),
        lambda c, n, op, x: F.linear(x, used(c, n, op)),
    ),
    "odd": (
        _own(lambda w, op: (op.get("size", 3), 5), -0.5, 0.5),
        lambda c, n, op, x: x * (1 + used(c, n, op).sin().mean()),
    ),
    "large": (
        _own(lambda w, op: (op.get("numel", 128),), -0.5, 0.5),
        lambda c, n, op, x: x * (1 + used(c, n, op).sin().mean()),
    ),
    "deep": (
        _own(lambda w, op: (2, 1, op.get("size", 3)), -0.5, 0.5),
        lambda c, n, op, x: x + used(c, n, op).cos().sum() * 0.1,
    ),
    "empty": (
        _own(lambda w, op: (0, w) if op.get("size", 1) % 2 else (0,), 0.0, 1.0),
        lambda c, n, op, x: x + used(c, n, op).sum(),
    ),
    "complex": (
        lambda c, n, op, b: setattr(
            c, n, b.parameter({**op, "dtype": "complex"}, (b.width,), 0.3, 0.9)
        ),
        _complex,
    ),
    "float": (
        lambda c, n, op, b: setattr(
            c, n, b.parameter({**op, "dtype": "single"}, (b.width,), 0.5, 1.5)
        ),
        lambda c, n, op, x: x * used(c, n, op).to(x.dtype),
    ),
    "lowrank": (_low_rank, lambda c, n, op, x: x + x @ getattr(c, n).t() @ getattr(c, n + "b").t()),
    "linear": (
        _layer(lambda w, op: nn.Linear(w, w, bias=bool(op.get("size", 1) % 2))),
        lambda c, n, op, x: getattr(c, n)(x),
    ),
    "mlp": (
        _layer(lambda w, op: nn.Sequential(nn.Linear(w, 3), nn.Tanh(), nn.Linear(3, w))),
        lambda c, n, op, x: getattr(c, n)(x),
    ),
    "layernorm": (_layer(lambda w, op: nn.LayerNorm(w)), lambda c, n, op, x: getattr(c, n)(x)),
    "batchnorm": (_layer(lambda w, op: nn.BatchNorm1d(w)), lambda c, n, op, x: getattr(c, n)(x)),
    "embedding": (_layer(lambda w, op: nn.Embedding(VOCABULARY, w)), _rows),
    "conv": (
        _layer(lambda w, op: nn.Conv1d(1, 1, 3, padding=1)),
        lambda c, n, op, x: getattr(c, n)(x.unsqueeze(1)).squeeze(1),
    ),
    "attention": (_layer(lambda w, op: nn.MultiheadAttention(w, 2, batch_first=True)), _attention),
    "gru": (
        _layer(lambda w, op: nn.GRU(w, w)),
        lambda c, n, op, x: getattr(c, n)(x.unsqueeze(1))[0].squeeze(1),
    ),
    "weight_norm": (_layer(_normalised), lambda c, n, op, x: getattr(c, n)(x)),
    "buffer": (_buffer, _buffered),
    "tanh": (None, lambda c, n, op, x: torch.tanh(x)),
    "relu_": (None, lambda c, n, op, x: F.relu(x * 1.0, inplace=True) + 0.1 * x),
    "inplace": (None, lambda c, n, op, x: x.mul_(0.9)),
    "view": (None, lambda c, n, op, x: x.view(x.shape)),
    "copy": (None, lambda c, n, op, x: x.clone()),
}
