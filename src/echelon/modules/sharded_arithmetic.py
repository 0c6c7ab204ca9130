"""Elementwise functions of tensors of which each rank holds a part, and views and copies of them.

A function that computes each element by itself gives on the parts the part of what it gives on the
whole. All operands must be parts of the same elements for that: numbers are, of a plain tensor of
the whole shape this rank's part is taken, and a tensor that the ranks have divided otherwise is
gathered. Where the target of a write is a plain tensor, every rank needs the whole value, and the
parts are gathered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer

from echelon.errors import StateError
from echelon.modules.memory_writes import tensors_in
from echelon.modules.sharded_tensor import (
    Rule,
    ShardedTensor,
    Sharding,
    call_plain,
    is_part,
    local_shard,
    mark,
    parts_in,
    refuse,
    same_ranks,
    sharding_of,
)

_MAX_FRAMES = 8  # between an optimizer and this file, for modes of torch and of simulated ranks


def functions(names: str, *owners: Any) -> Iterator[Callable[..., Any]]:
    """The functions of these names in ``torch`` and ``Tensor``, or in ``owners``."""
    for name in names.split():
        for owner in owners or (torch, Tensor):
            if hasattr(owner, name):
                yield getattr(owner, name)


def is_called_by(module: str) -> bool:
    """Whether code of this module of torch, or of a submodule, has called a function of torch."""
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        if f"{frame.f_globals.get('__name__')}.".startswith(f"{module}."):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def is_called_by_optimizer() -> bool:
    """Whether an optimizer has called, whose states are plain tensors of this rank's parts.

    It may use them beside parts outside of a step, too. What it computes of parts stays parts.
    """
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch.optim.") and not name.endswith(("swa_utils", "lr_scheduler")):
            return True
        if isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


# Gradients of results ------------------------------------------------------------------------


class _OutsideForward(torch.autograd.Function):
    """A result computed from parts; a backward through it would give gradients to parts."""

    @staticmethod
    def forward(ctx: Any, text: str, compute: Callable[[], Any], *inputs: Tensor) -> Any:
        ctx.text = text
        result = compute()
        return tuple(result) if isinstance(result, list) else result  # autograd sees no lists

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise StateError(
            f"a backward through {ctx.text}, which was used while it was sharded: compute what the "
            "loss needs of it inside of the forward of its unit, make no unit of that module (then "
            "it belongs to the one around it), or use weight decay of the optimizer for a penalty"
        )


def without_gradient(compute: Callable[[], Any], operands: Any) -> Any:
    """The result of ``compute``, of lists a sequence; a backward through it is refused."""
    tensors: list[Tensor] = []
    with DisableTorchFunctionSubclass():
        if torch.is_grad_enabled():
            tensors = [tensor for tensor in tensors_in(operands) if _needs_gradient(tensor)]
        if not tensors:
            with torch.no_grad():
                return compute()
    parts = [tensor for tensor in tensors if is_part(tensor)]
    text = sharding_of(parts[0]).describe() if parts else "a sharded tensor"
    # Not the parameter itself: autograd would remember the shape of its part.
    leaf = torch.zeros((), requires_grad=True, device="cpu")
    with DisableTorchFunctionSubclass():
        return _OutsideForward.apply(text, compute, leaf)  # type: ignore[no-untyped-call]


def _needs_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad or (isinstance(tensor, ShardedTensor) and tensor.uses_parameters)


def _note_write(target: Tensor, values: Any) -> None:
    """Let a backward through the part ``target`` be refused if what is written needs gradients."""
    if isinstance(target, ShardedTensor):
        with DisableTorchFunctionSubclass():
            target.uses_parameters |= any(map(_needs_gradient, tensors_in(values)))


# Operands ------------------------------------------------------------------------------------


def gathered(value: Any) -> Any:
    """The same argument, whole; a backward through it is refused. All ranks call it."""
    if not is_part(value):
        return value
    return without_gradient(lambda: sharding_of(value).gather(local_shard(value)), value)


def _has_rows_of(part: Sharding, home: Sharding) -> bool:
    """Whether the ranks hold the same rows of both, of which only later dims differ."""
    return (
        part.by_rows
        and home.by_rows
        and bool(part.shape)
        and len(part.shape) == len(home.shape)
        and part.shape[0] == home.shape[0]
        and same_ranks(part.group, home.group)
    )


def operand(value: Any, home: Sharding, func: Callable[..., Any]) -> Any:
    """The part of an argument that belongs to the part ``home``."""
    if not isinstance(value, Tensor):
        return value
    if is_part(value):
        part = sharding_of(value)
        if part.is_like(home):
            local = local_shard(value)
            return local if local.shape == home.local_shape else local.reshape(home.local_shape)
        if _has_rows_of(part, home):
            return local_shard(value)
        value = part.gather(local_shard(value))
    if not value.dim():
        return value
    shape = tuple(value.shape)
    if value.numel() == 1 and len(shape) <= len(home.shape):
        return value.detach().reshape(1)
    whole = torch.broadcast_shapes(shape, home.shape) if _broadcasts(shape, home.shape) else None
    if whole == home.shape:
        return home.part_of(value.detach().expand(home.shape))
    if shape == home.local_shape and is_called_by_optimizer():
        return value.detach()
    if whole is not None:
        refuse(func, [_part_of(home)], {}, "broadcasts a parameter")
    _refuse_shape(shape, home)


def _refuse_shape(shape: Sequence[int], home: Sharding) -> NoReturn:
    raise StateError(
        f"a tensor of {list(shape)} beside {home.describe()}: a parameter, and all that is "
        "computed from it, has the whole shape; give a tensor of that shape, of which each rank "
        "takes its part, or work with ec.local_shard(parameter), as for the state that an "
        "optimizer keeps for it"
    )


def _written_into(target: Tensor, values: Any) -> Callable[[Any], Any]:
    """What a write into a plain tensor takes of parts: the whole, or as a state this rank's part.

    A tensor of neither shape is refused, before anything is gathered.
    """
    homes = [sharding_of(part) for part in parts_in(values)]
    shape = tuple(target.shape)
    if not homes or is_part(target):
        return gathered
    if all(shape == home.local_shape for home in homes) and is_called_by_optimizer():
        return lambda value: local_shard(value) if is_part(value) else value
    for home in homes:
        fits = _broadcasts(shape, home.shape)
        if not fits or tuple(torch.broadcast_shapes(shape, home.shape)) != shape:
            _refuse_shape(shape, home)
    return gathered


def _part_of(sharding: Sharding) -> Tensor:
    return mark(torch.empty(0, device="cpu"), sharding)


def _broadcasts(shape: Sequence[int], other: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return all(a == b or a == 1 or b == 1 for a, b in pairs)


def _home_of(parts: Sequence[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Sharding:
    """Of which operand the result is the like: one that has the shape of the result."""
    shardings = [sharding_of(part) for part in parts]
    if len(shardings) == 1:
        return shardings[0]
    numel = max(sharding.numel for sharding in shardings)
    dims = max(len(sharding.shape) for sharding in shardings)
    for sharding in shardings:
        if sharding.numel == numel and len(sharding.shape) == dims:
            return sharding
    refuse(func, args, kwargs, "broadcasts parameters")


# Elementwise ---------------------------------------------------------------------------------


def part_like(result: Any, home: Sharding) -> Any:
    """The result as a part of the same elements, in memory of its own."""
    if not isinstance(result, Tensor):
        return result
    assert result.shape == home.local_shape, f"{result.shape} is no part of {home.describe()}"
    return mark(result, home.fresh())


def elementwise(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A new tensor; with ``out=`` the one that is given."""
    if kwargs.get("out") is not None:
        kwargs = dict(kwargs)
        out = kwargs.pop("out")
        compute = elementwise if parts_in((args, kwargs)) else call_plain
        target_of(out, func)(compute(func, args, kwargs))
        return out
    home = _home_of(parts_in((args, kwargs)), func, args, kwargs)
    local = [operand(value, home, func) for value in args]
    named = {key: operand(value, home, func) for key, value in kwargs.items()}
    result = without_gradient(lambda: call_plain(func, local, named), (args, kwargs))
    if isinstance(result, tuple):
        refuse(func, args, kwargs, "of a mask gives indices, which need the whole tensor")
    return part_like(result, home)


def target_of(out: Tensor, func: Callable[..., Any]) -> Callable[[Tensor], object]:
    """What writes a result into ``out``."""
    return lambda result: in_place(Tensor.copy_, (out, result), {})


def in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A write into the first argument, whole or a part."""
    target = args[0]
    if not is_part(target):
        taken = _written_into(target, (args[1:], kwargs))
        values = [taken(value) for value in args[1:]]
        named = {key: taken(value) for key, value in kwargs.items()}
        return call_plain(func, [target, *values], named)
    home = sharding_of(target)
    local = [operand(value, home, func) for value in args[1:]]
    named = {key: operand(value, home, func) for key, value in kwargs.items()}
    if home.before_write is not None:
        home.before_write()
    if torch.is_grad_enabled():
        _note_write(target, (args[1:], kwargs))
    return call_plain(func, [target, *local], named)


def foreach(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of lists of tensors, elementwise or in place, whole or parts one by one."""
    is_write = func.__name__.endswith("_")
    lists = [arg for arg in args if _is_list(arg)]
    homes: list[Sharding | None] = []
    takers: list[Callable[[Any], Any]] = []
    for operands in zip(*lists, strict=True):
        parts = parts_in(operands[:1] if is_write else operands)
        homes.append(sharding_of(parts[0]) if parts else None)
        takers.append(_written_into(operands[0], operands[1:]) if is_write else gathered)

    def convert(values: Sequence[Any]) -> list[Any]:
        return [
            taker(value) if home is None else operand(value, home, func)
            for value, home, taker in zip(values, homes, takers, strict=True)
        ]

    first = [args[0]] if is_write else [convert(args[0])]
    local = [*first, *(convert(arg) if _is_list(arg) else gathered(arg) for arg in args[1:])]
    named = {key: convert(arg) if _is_list(arg) else gathered(arg) for key, arg in kwargs.items()}
    if is_write:
        for home in homes:
            if home is not None and home.before_write is not None:
                home.before_write()
        if torch.is_grad_enabled():
            for target, *values in zip(*lists, strict=True):
                _note_write(target, values)
        return call_plain(func, local, named)
    results = without_gradient(lambda: call_plain(func, local, named), (args, kwargs))
    pairs = zip(results, homes, strict=True)
    return [result if home is None else part_like(result, home) for result, home in pairs]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value)


def initialised(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of ``nn.init`` that draws nothing."""
    value = kwargs["val"] if "val" in kwargs else args[1] if len(args) > 1 else None
    number = 1.0 if func is nn.init.ones_ else 0.0 if value is None else value
    with torch.no_grad():
        return in_place(Tensor.fill_, (args[0], number), {})


_UNARY = (
    "abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh "
    "ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac isfinite isinf "
    "isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not logit nan_to_num neg "
    "negative positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh "
    "sqrt square tan tanh trunc bitwise_not conj_physical resolve_conj resolve_neg clamp clamp_max "
    "clamp_min clip selu celu threshold hardshrink __abs__ __neg__ __pos__ __invert__"
)
_BINARY = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow "
    "float_power atan2 arctan2 hypot copysign nextafter maximum minimum fmax fmin lerp where "
    "masked_fill addcmul addcdiv rsub xlogy heaviside ldexp isclose eq ne lt le gt ge "
    "greater greater_equal less less_equal not_equal logical_and logical_or logical_xor "
    "bitwise_and bitwise_or bitwise_xor __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ "
    "__truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ "
    "__rpow__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __eq__ __ne__ __lt__ __le__ __gt__ "
    "__ge__"
)
_WRITES = (
    "copy_ zero_ fill_ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ "
    "__ipow__ __iand__ __ior__ __ixor__"
)
_NOT_WRITTEN = {"where", "isclose", "maximum", "minimum", "fmax", "fmin", "rsub"}


def _write_names() -> str:
    names = [name for name in f"{_UNARY} {_BINARY}".split() if not name.startswith("__")]
    return " ".join([_WRITES, *(f"{name}_" for name in names if name not in _NOT_WRITTEN)])


def _foreach_functions() -> Iterator[Callable[..., Any]]:
    for name in dir(torch):
        if name.startswith("_foreach_") and name not in (
            "_foreach_max",
            "_foreach_mm",
            "_foreach_norm",
            "_foreach_powsum",
        ):
            yield getattr(torch, name)


ARITHMETIC: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys(functions(f"{_UNARY} {_BINARY}"), elementwise),
    **dict.fromkeys(functions(_write_names()), in_place),
    **dict.fromkeys(_foreach_functions(), foreach),
    **dict.fromkeys(functions("constant_ zeros_ ones_", nn.init), initialised),
}
