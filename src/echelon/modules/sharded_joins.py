"""Tensors end to end, as ``parameters_to_vector`` makes them, of which each rank holds parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from echelon.modules.sharded_arithmetic import (
    functions,
    gathered,
    in_place,
    without_gradient,
)
from echelon.modules.sharded_tensor import (
    Rule,
    Sharding,
    is_part,
    local_shard,
    mark,
    refuse,
    same_ranks,
    sharding_of,
    whole_shape,
)


def _joined(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Several tensors end to end; of parts it is a part."""
    tensors, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    shardings = [sharding_of(tensor) if is_part(tensor) else None for tensor in tensors]
    first = next(sharding for sharding in shardings if sharding is not None)
    groups = [sharding.group for sharding in shardings if sharding is not None]
    shapes = [whole_shape(tensor) for tensor in tensors]
    is_stack = func is torch.stack
    if func in _HSTACKS and any(len(shape) != 1 for shape in shapes):
        dim = 1
    if (
        dim != 0
        or kwargs.get("out") is not None
        or not all(same_ranks(first.group, group) for group in groups)
    ):
        refuse(func, args, kwargs)
    with DisableTorchFunction():
        meta = [torch.empty(shape, device="meta") for shape in shapes]
        shape = tuple((torch.stack(meta) if is_stack else torch.cat(meta)).shape)
    pieces: list[Sharding] = []
    for sharding, whole in zip(shardings, shapes, strict=True):
        flat = (math.prod(whole),)
        if sharding is None:
            pieces.append(Sharding("a replicated tensor", "", flat))
        elif sharding.pieces:
            pieces += sharding.pieces
        else:
            fresh = sharding.fresh()
            pieces.append(fresh.flattened(flat))
    joined = Sharding(
        "parameters end to end",
        "",
        shape,
        group=first.group,
        is_staged=any(sharding is not None and sharding.is_staged for sharding in shardings),
        pieces=tuple(pieces),
    )
    local = [local_shard(tensor).reshape(-1) for tensor in tensors]
    return without_gradient(lambda: mark(torch.cat(local), joined), args)


def _item(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A slice of parameters end to end that consists of whole parameters."""
    tensor, index = args
    if not is_part(tensor):
        return func(tensor, _whole(index))
    sharding = sharding_of(tensor)
    is_slice = isinstance(index, slice) and index.step in (None, 1) and len(sharding.shape) == 1
    if is_slice and sharding.pieces:
        start, stop, _ = index.indices(sharding.numel)
        whole = local = 0
        for piece in sharding.pieces:
            if whole == start and whole + piece.numel == stop:
                own = slice(local, local + piece.local[1])
                part = without_gradient(partial(getitem, local_shard(tensor), own), tensor)
                return part if piece.group is None else mark(part, piece)
            whole, local = whole + piece.numel, local + piece.local[1]
    refuse(func, args, kwargs)


def _whole(index: Any) -> Any:
    """An index into a plain tensor, without parts."""
    if isinstance(index, tuple | list):
        return type(index)(map(_whole, index))
    return gathered(index)


def _written_item(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """``tensor[:] = value`` and ``tensor[...] = value``."""
    tensor, index, value = args
    is_all = index is Ellipsis or (isinstance(index, slice) and index == slice(None))
    if not is_part(tensor):
        func(tensor, _whole(index), gathered(value))
    elif is_all:
        in_place(Tensor.copy_ if isinstance(value, Tensor) else Tensor.fill_, (tensor, value), {})
    elif isinstance(index, int) and len(whole_shape(tensor)) == 1 and not is_part(value):
        sharding = sharding_of(tensor)
        start, numel = sharding.local
        place = range(sharding.numel)[index] - start
        if sharding.pieces:
            refuse(func, args, kwargs)
        if sharding.before_write is not None:
            sharding.before_write()
        if 0 <= place < numel:
            local_shard(tensor).view(-1)[place] = value
    else:
        refuse(func, args, kwargs)


_HSTACKS = tuple(functions("hstack", torch))
JOINS: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys(functions("cat concat concatenate stack hstack", torch), _joined),
    Tensor.__getitem__: _item,
    Tensor.__setitem__: _written_item,
}
