"""Copies and views of tensors of which each rank holds a part, and what is given to ``.data``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass

from echelon.errors import StateError
from echelon.modules.sharded_arithmetic import (
    functions,
    is_called_by_optimizer,
    operand,
    part_like,
    without_gradient,
)
from echelon.modules.sharded_tensor import (
    KeptGradient,
    Rule,
    Sharding,
    call_plain,
    is_part,
    local_shard,
    mark,
    part_aliases,
    refuse,
    refuse_kept,
    remember_alias,
    sharding_of,
    unmarked,
    whole_shape,
)


def _without_format(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "memory_format"}


def _alias(result: Tensor, tensor: Tensor, sharding: Sharding) -> Tensor:
    """The result as a part; it may have the memory of the part ``tensor``."""
    with DisableTorchFunctionSubclass():
        is_alias = result.data_ptr() == tensor.data_ptr()
    if not is_alias:
        return mark(result, sharding.fresh())
    marked = mark(result, sharding)
    if sharding.before_write is not None:
        remember_alias(sharding, marked)
    return marked


def moved(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same elements in another dtype, on another device, or without a graph."""
    kwargs = _without_format(kwargs)
    if not is_part(args[0]):
        return call_plain(func, args, kwargs)  # the part only says to which dtype and device
    sharding = sharding_of(args[0])
    result = without_gradient(lambda: call_plain(func, args, kwargs), args[0])
    if result is args[0] or not isinstance(result, Tensor):
        return result
    return _alias(result, args[0], sharding)


def detached(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same memory, without a graph."""
    return _alias(call_plain(func, args, kwargs), args[0], sharding_of(args[0]))


def copied(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A copy, or a new tensor like the first argument."""
    kwargs = _without_format(kwargs)
    sharding = sharding_of(args[0])
    local = [operand(value, sharding, func) for value in args]
    if func in _LIKES:
        result = call_plain(func, local, kwargs)
    else:
        result = without_gradient(lambda: call_plain(func, local, kwargs), args)
    return part_like(result, sharding)


def viewed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same elements in another shape."""
    with DisableTorchFunction(), torch.no_grad():
        meta = [on_meta(value) for value in args]
        if not is_part(args[0]):
            meta[0] = args[0]
        result = func(*meta, **{key: on_meta(value) for key, value in kwargs.items()})
    if not is_part(args[0]):
        return result if not args[0].requires_grad else args[0].view(result.shape)
    if result.dtype != meta[0].dtype:
        refuse(func, args, kwargs)
    sharding, shape = sharding_of(args[0]), tuple(result.shape)
    if shape == sharding.shape:
        local = without_gradient(lambda: local_shard(args[0]), args[0])
        return _alias(local, args[0], sharding)
    local = without_gradient(lambda: unmarked(args[0]).detach().reshape(-1), args[0])
    return _alias(local, args[0], sharding.flattened(shape))


def on_meta(value: Any) -> Any:
    """The same argument, of a part a tensor like the whole, without memory."""
    if not is_part(value):
        return value
    return torch.empty(sharding_of(value).shape, dtype=value.dtype, device="meta")


def set_data(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """``tensor.data = value``.

    A parameter keeps its memory, and what users kept of it gets others; any other part gets that of
    the value, as in plain torch.
    """
    target, value = args
    home = sharding_of(target)
    with DisableTorchFunctionSubclass():
        is_same = value.data_ptr() == target.data_ptr() and value.shape == target.shape
        is_other = (value.dtype, value.device) != (target.dtype, target.device)
    if is_other:  # a conversion of the model, which the wrapper refuses
        call_plain(func, (target, value), kwargs)
        return
    if is_same and value.numel():
        return
    if whole_shape(value) != home.shape and not is_called_by_optimizer():
        raise StateError(
            f"a value of {list(whole_shape(value))} for .data of {home.describe()}: give a value "
            "of the whole shape, of which each rank takes its part, or one computed from parameters"
        )
    taken = operand(value, home, func)
    if not isinstance(target, nn.Parameter):
        call_plain(func, (target, taken.expand(home.local_shape)), kwargs)
        return
    if home.before_write is not None:
        home.before_write()
    with torch.no_grad(), DisableTorchFunctionSubclass():
        part_aliases(home, target)
        target.detach().copy_(taken)


def set_grad(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """``parameter.grad = value``: a plain value is that of the whole parameter."""
    target, value = args
    if value is None:
        pass
    elif isinstance(value, KeptGradient):
        if not sharding_of(target).is_like(sharding_of(value)):
            refuse_kept(value, "setting .grad of another parameter to it, a use")
    elif isinstance(value, Tensor):
        home = sharding_of(target)
        if is_part(value) and sharding_of(value).is_like(home):
            local = local_shard(value)
            if local.shape != home.local_shape:  # a view of another shape, as of a long vector
                value = mark(local.view(home.local_shape), home.fresh())
        else:
            if whole_shape(value) != home.shape and value.shape != home.local_shape:
                raise StateError(f"a gradient of {list(value.shape)} for {home.describe()}")
            part = operand(value, home, func).expand(home.local_shape)  # it may be one element
            value = mark(part.clone(), home.fresh())
    call_plain(func, (target, value), kwargs)


_LIKES = frozenset(functions("zeros_like ones_like empty_like full_like"))
_data: Any = Tensor.data
_grad: Any = Tensor.grad
VIEWS: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys(
        functions("to float double half bfloat16 cpu cuda type type_as contiguous", Tensor), moved
    ),
    **dict.fromkeys(functions("detach"), detached),
    **dict.fromkeys(functions("clone zeros_like ones_like empty_like full_like"), copied),
    **dict.fromkeys(functions("view reshape flatten ravel view_as reshape_as"), viewed),
    _data.__get__: detached,
    _data.__set__: set_data,
    _grad.__set__: set_grad,
}
