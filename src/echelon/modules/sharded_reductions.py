"""Sums, means, largest values and comparisons of tensors of which each rank holds a part.

Each rank reduces its part, one collective brings the results of all ranks to all of them, and every
rank combines them in rank order. So all ranks get the same bits, those of the whole tensor up to
the order of a sum. Floating-point sums are taken in float64. Along dims that no rank has a part of
nothing is combined, and the result is a part again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.modules.sharded_arithmetic import functions, operand, without_gradient
from echelon.modules.sharded_tensor import (
    Rule,
    Sharding,
    call_plain,
    is_part,
    local_shard,
    mark,
    parts_in,
    refuse,
    sharding_of,
    unmarked,
)
from echelon.modules.stage_gradients import number_of_stage, refuse_joined, refuse_torch_scaler

_SUMS = ("sum", "nansum", "prod", "mean")  # whose results have the dtype of the tensor
_LABEL = "values of a sharded tensor, which all ranks take"


class _Reduction(NamedTuple):
    """How a rank reduces its part to one number, and how the numbers are combined."""

    part: Callable[[Tensor, Mapping[str, Any]], Tensor]
    combine: Callable[[Tensor], Tensor]


def _wide(part: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values in the dtype in which they are added."""
    part = part if dtype is None else part.to(dtype)
    if part.dtype.is_complex:
        return part.to(torch.complex128)
    return part.double() if part.dtype.is_floating_point else part.long()


def _extreme(pick: Callable[[Tensor], Tensor], *, smallest: bool) -> _Reduction:
    def of_part(part: Tensor, named: Mapping[str, Any]) -> Tensor:
        if part.numel():
            return pick(part)
        if part.dtype is torch.bool:
            return torch.tensor(smallest, device="cpu")
        info = torch.finfo(part.dtype) if part.dtype.is_floating_point else torch.iinfo(part.dtype)
        value = info.max if smallest else info.min
        infinite = math.inf if smallest else -math.inf
        return part.new_tensor(infinite if part.dtype.is_floating_point else value)

    return _Reduction(of_part, pick)


_SUM = _Reduction(lambda part, named: _wide(part, named.get("dtype")).sum(), torch.sum)
_REDUCTIONS: dict[str, _Reduction] = {
    "sum": _SUM,
    "mean": _SUM,
    "nansum": _Reduction(lambda part, named: _wide(part, named.get("dtype")).nansum(), torch.sum),
    "count_nonzero": _Reduction(lambda part, named: part.count_nonzero(), torch.sum),
    "prod": _Reduction(lambda part, named: _wide(part, named.get("dtype")).prod(), torch.prod),
    "max": _extreme(torch.max, smallest=False),
    "min": _extreme(torch.min, smallest=True),
    "amax": _extreme(torch.max, smallest=False),
    "amin": _extreme(torch.min, smallest=True),
    "any": _Reduction(lambda part, named: part.any(), torch.any),
    "all": _Reduction(lambda part, named: part.all(), torch.all),
}


def over_ranks(value: Tensor, sharding: Sharding, combine: Callable[[Tensor], Tensor]) -> Tensor:
    """Combine one number of each rank, in rank order. All ranks call it."""
    group = sharding.group
    assert group is not None
    is_bool = value.dtype is torch.bool
    sent = (value.byte() if is_bool else value).detach().reshape(1).to(group.device)
    received = sent.new_empty(group.size)
    group.all_gather_single(received, sent, label=_LABEL)
    result = combine(received.bool() if is_bool else received)
    return result.to(value.device)


def counted(tensor: Tensor) -> tuple[Sharding, Tensor]:
    """Of a part, what of it counts on this rank, so that each element counts once."""
    sharding, local = sharding_of(tensor), local_shard(tensor)
    if not sharding.pieces:
        return sharding, local
    group = sharding.group
    assert group is not None
    pairs = sharding.split(local)
    kept = [part for piece, part in pairs if piece.group is not None or group.rank == 0]
    return sharding, torch.cat(kept) if kept else local[:0]


def _dims_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The dims that are asked for, None for all, and the other arguments by name."""
    named = dict(kwargs)
    order = {
        "var": ("dim", "unbiased", "keepdim"),
        "std": ("dim", "unbiased", "keepdim"),
        "count_nonzero": ("dim",),
    }.get(name, ("dim", "keepdim"))
    given = list(args[1:])
    if name in ("var", "std") and given and isinstance(given[0], bool):
        order = ("unbiased", "keepdim")
    elif given and all(isinstance(value, int) for value in given) and len(given) > 1:
        given = given if isinstance(given[1], bool) else [tuple(given)]
    named.update(zip(order, given, strict=False))
    if "axis" in named:
        named["dim"] = named.pop("axis")
    return named.pop("dim", None), named


def reduced(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function that makes one number of a tensor, or one of each row."""
    name = func.__name__
    if (len(args) > 1 and isinstance(args[1], Tensor)) or not is_part(args[0]):
        refuse(func, args, kwargs)  # such as the larger ones of two tensors
    sharding = sharding_of(args[0])
    dim, named = _dims_of(name, args, kwargs)
    if named.get("out") is not None:
        refuse(func, args, kwargs)
    dims = dims_within(dim, sharding)
    if dim is not None and name in ("max", "min"):
        refuse(func, args, kwargs, "along a dim")
    if dims is not None:
        return along_rows(func, args, kwargs, dims, bool(named.get("keepdim")))
    if sharding.is_staged and sharding.pieces:
        refuse_joined(f"{name}()")
    if sharding.is_staged and sharding.group is None:
        return number_of_stage(call_plain(func, args, kwargs), sharding.source)

    def compute() -> Tensor:
        whole = _number(name, args[0], named)
        return whole.view((1,) * len(sharding.shape)) if named.get("keepdim") else whole

    result = without_gradient(compute, args)
    return number_of_stage(result, sharding.source) if sharding.is_staged else result


def dims_within(dim: Any, sharding: Sharding) -> tuple[int, ...] | None:
    """The dims that are reduced; None if these are all."""
    count = len(sharding.shape)
    if dim is None or dim == () or dim == []:
        return None
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    dims = tuple(sorted({d % max(count, 1) for d in dims if -count <= d < max(count, 1)}))
    return None if len(dims) == max(count, 1) else dims


def along_rows(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dims: tuple[int, ...],
    keepdim: bool,
) -> Any:
    """A function along some dims, which this rank has in full: the result is a part again."""
    sharding = sharding_of(args[0])
    if not sharding.by_rows or 0 in dims:
        refuse(func, args, kwargs, f"along dims {list(dims)} needs elements of other ranks")
    shape = tuple(
        1 if d in dims else length
        for d, length in enumerate(sharding.shape)
        if keepdim or d not in dims
    )
    result = without_gradient(lambda: call_plain(func, args, kwargs), args)
    return mark(result, sharding.rows_in(shape))


def _number(name: str, tensor: Tensor, named: Mapping[str, Any]) -> Tensor:
    sharding, part = counted(tensor)
    if name in ("var", "std"):
        return _spread(name, sharding, part, named)
    if not sharding.numel and name in ("max", "min", "amax", "amin"):
        refuse(getattr(torch, name), [tensor], {}, "of no elements has no value")
    rule = _REDUCTIONS[name]
    whole = over_ranks(rule.part(part, named), sharding, rule.combine)
    if name == "mean":
        whole = whole / sharding.numel if sharding.numel else whole / 0
    is_exact = not (part.dtype.is_floating_point or part.dtype.is_complex)
    if name in _SUMS and not (is_exact and named.get("dtype") is None):
        whole = whole.to(named.get("dtype") or part.dtype)
    return whole


def _spread(name: str, sharding: Sharding, part: Tensor, named: Mapping[str, Any]) -> Tensor:
    """The variance or the standard deviation, in two passes."""
    correction = named.get("correction")
    if correction is None:
        correction = 0 if named.get("unbiased") is False else 1
    wide, numel = _wide(part), sharding.numel
    mean = over_ranks(wide.sum(), sharding, torch.sum) / numel
    squares = over_ranks((wide - mean).abs().square().sum(), sharding, torch.sum)
    variance = squares / max(numel - correction, 0)
    return (variance.sqrt() if name == "std" else variance).to(part.dtype.to_real())


# Comparisons and products of two -------------------------------------------------------------


def _pair(func: Callable[..., Any], args: Sequence[Any]) -> tuple[Sharding, Tensor, Tensor] | None:
    """The parts of two tensors of one shape; None if their shapes differ."""
    home = sharding_of(parts_in(args)[0])
    shapes = {sharding_of(a).shape if is_part(a) else tuple(a.shape) for a in args[:2]}
    if len(shapes) != 1:
        return None
    first, second = (operand(value, home, func) for value in args[:2])
    return home, first, second


def compared(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """``torch.equal`` and ``torch.allclose``: whether all ranks find it."""
    pair = _pair(func, args)
    if pair is None:
        if func.__name__ == "equal":
            return False
        refuse(func, args, kwargs, "compares tensors of different shapes")
    home, first, second = pair
    local = func(first, second, *args[2:], **kwargs)
    return bool(over_ranks(torch.tensor(local, device="cpu"), home, torch.all))


def multiplied(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """``dot`` and ``vdot`` of two vectors."""
    pair = _pair(func, args)
    if pair is None or len(pair[0].shape) != 1:
        refuse(func, args, kwargs, "of tensors that are no vectors of one length")

    def compute() -> Tensor:
        home, first, second = pair
        first = first.conj() if func.__name__ == "vdot" else first
        products = mark((first * second).resolve_conj(), home)
        return _number("sum", products, {})

    product: Tensor = without_gradient(compute, args)
    return number_of_stage(product, pair[0].source) if pair[0].is_staged else product


# One element ---------------------------------------------------------------------------------


def element(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A Python number of a tensor with one element."""
    sharding = sharding_of(args[0])
    if sharding.numel != 1:
        value = torch.zeros((), device="cpu").expand(sharding.shape)
        return func(value)  # torch says what is wrong
    return func(sharding.gather(local_shard(args[0])), *args[1:], **kwargs)


def non_finite(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``GradScaler``'s check: all ranks find what one finds. All ranks call it."""
    gradients, flag = args[0], args[1]
    if any(sharding_of(part).is_staged for part in parts_in(gradients)):
        refuse_torch_scaler()
    result = call_plain(func, args, kwargs)
    groups = {}
    for part in parts_in(gradients):
        group = sharding_of(part).group
        if group is not None:
            groups[group.ranks] = sharding_of(part)
    for sharding in groups.values():
        flag.copy_(over_ranks(unmarked(flag), sharding, torch.max))
    return result


REDUCTIONS: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys(functions(" ".join([*_REDUCTIONS, "var", "std"])), reduced),
    **dict.fromkeys(functions("equal allclose"), compared),
    **dict.fromkeys(functions("dot vdot"), multiplied),
    **dict.fromkeys(
        functions("item __float__ __int__ __bool__ __index__ __complex__", Tensor), element
    ),
    torch._amp_foreach_non_finite_check_and_unscale_: non_finite,
}
