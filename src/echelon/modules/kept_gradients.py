"""What may be done with a ``KeptGradient``: ask for facts, drop it, and set it to zero.

``zero_grad()`` does this in both forms, for parameters one by one or in lists. All else needs
values, which nobody has before the ranks have reduced them, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from echelon.modules.sharded_arithmetic import functions
from echelon.modules.sharded_tensor import (
    KeptGradient,
    Rule,
    ShardedTensor,
    sharding_of,
)


def _itself(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What has the same memory: ``p.grad.data.zero_()`` means ``p.grad.zero_()``."""
    return args[0]


def _zero(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    return make_zero(args[0])


def _zero_each(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """``torch._foreach_zero_`` of a list in which some are kept."""
    others = []
    for gradient in args[0]:
        if isinstance(gradient, KeptGradient):
            make_zero(gradient)
        else:
            others.append(gradient)
    if others:
        func(others)


def make_zero(gradient: KeptGradient) -> Tensor:
    """Drop what is kept, and make this object a gradient of zeros."""
    sharding = gradient._sharding
    with DisableTorchFunctionSubclass(), torch.no_grad():
        gradient.data = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        vars(gradient).clear()
        zeros: Tensor = gradient
        zeros.__class__ = Tensor if sharding.group is None else ShardedTensor
        if isinstance(zeros, ShardedTensor):
            zeros._sharding = sharding
    return zeros


def _text(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return f"KeptGradient({sharding_of(args[0]).describe()}: not reduced yet)"


_data: Any = Tensor.data
KEPT: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys(functions("detach detach_", Tensor), _itself),
    _data.__get__: _itself,
    Tensor.zero_: _zero,
    torch.zero_: _zero,
    torch._foreach_zero_: _zero_each,
    Tensor.__repr__: _text,
    Tensor.__format__: _text,
}
