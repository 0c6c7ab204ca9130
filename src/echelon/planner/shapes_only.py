"""``ShapesOnly``: a program runs with all its allocations, and computes nothing that is large.

[Note: memory that nobody touches]
Tensors are real ones of the CPU, with storages, addresses and views, so that wrappers and autograd
do what they always do. The operating system backs memory by pages when they are touched, and large
tensors that are made within the block never are. Small tensors are computed as ever, because
programs look at them: lengths, flags, steps of an optimizer. So are tensors from outside, such as
the text that a program trains on, as long as none without values is mixed in.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from echelon.errors import UnsupportedError
from echelon.laboratory.allocations import tensors_in

# Elements above which nothing is computed. The tensors that a program looks at have fewer.
LARGE = 2**16
# What returns memory that is there, though its schema does not say so of all.
_IN_PLACE = frozenset({"aten::_unsafe_view", "aten::resize_", "aten::set_"})
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_META, _CPU = torch.device("meta"), torch.device("cpu")


class _Made(NamedTuple):
    """A tensor that an operation makes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@final
class ShapesOnly(TorchDispatchMode):
    """Large tensors that this thread makes within the block have memory and no values.

    Operations with them compute only shapes; what they return that is small has zeros. An operation
    whose result depends on values that are not there, such as ``nonzero``, is refused. Linux has no
    addresses for one tensor that is larger than the memory of the machine.

    Raises:
        UnsupportedError: an operation's shapes are not known without its values.

    Example:
        >>> with ShapesOnly():
        ...     a = torch.ones(30_000, 30_000)  # 3.6 GB, if it were touched
        ...     loss = (a @ a).mean()
        >>> loss.item()
        0.0
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[Any, Any] = {}  # results by operation and what it was given
        self._empty: set[int] = set()  # storages without values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if touches_nothing(func):
            return self._noted(func(*args, **kwargs)) if _is_empty(func) else func(*args, **kwargs)
        if not self._lacks_values(func, args, kwargs):
            return func(*args, **kwargs)
        made = self._shapes(func, args, kwargs)
        returns = func._schema.returns
        written = _written(func, args, kwargs)
        results = [
            written[next(iter(item.alias_info.before_set))]
            if item.alias_info is not None
            else self._make(value)
            for item, value in zip(returns, made if len(returns) > 1 else [made], strict=False)
        ]
        return results[0] if len(returns) == 1 else tuple(results) if returns else None

    def _lacks_values(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether an operation takes a large tensor without values, or makes one of nothing."""
        tensors = list(tensors_in((*args, *kwargs.values())))
        if tensors:
            return any(
                tensor.numel() > LARGE and self._is_without(tensor) for tensor in tensors
            ) or self._grows_large(func, args, kwargs, tensors)
        if not any(item.name == "device" for item in func._schema.arguments):
            return False
        if torch.device(kwargs.get("device") or _CPU) != _CPU:
            return False
        made: Tensor = func(*args, **{**kwargs, "device": _META, "pin_memory": None})
        return made.numel() > LARGE

    def _grows_large(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> bool:
        """Whether small tensors give a large one: the gradient of a weight, from few tokens.

        Numbers that are not floating point, such as masks, are what programs look at.
        """
        if func.tags and _NEEDS_VALUES & set(func.tags):
            return False
        if any(tensor.device != _CPU for tensor in tensors) or not _may_grow(func):
            return False
        try:
            made = self._shapes(func, args, kwargs)
        except (UnsupportedError, RuntimeError):  # computed, it says itself what is wrong
            return False
        numel = max(LARGE, sum(tensor.numel() for tensor in tensors))
        results = made if isinstance(made, list) else [made]
        return any(
            isinstance(item, _Made)
            and item.dtype.is_floating_point
            and math.prod(item.shape) > numel
            for item in results
        )

    def _is_without(self, tensor: Tensor) -> bool:
        """Whether a tensor has no values, or so few that it is a small one, expanded to a mask."""
        if tensor.device != _CPU:
            return False
        storage = tensor.untyped_storage()
        return storage._cdata in self._empty or storage.nbytes() < tensor.nbytes

    def _noted(self, made: Tensor) -> Tensor:
        """The tensor, whose memory has no values if it is large."""
        if made.numel() > LARGE and made.device == _CPU:
            storage = made.untyped_storage()
            self._empty.add(storage._cdata)
            weakref.finalize(storage, self._empty.discard, storage._cdata).atexit = False
        return made

    def _make(self, value: Any) -> Any:
        if isinstance(value, _Made):
            made = torch.empty_strided(value.shape, value.strides, dtype=value.dtype)
            return self._noted(made) if made.numel() > LARGE else made.zero_()
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self._make(item) for item in value]
        return value

    def _shapes(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What the operation would return, with descriptions of the tensors that it makes."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        key: Any = (func, spec, *(_key(leaf) for leaf in leaves))
        try:
            if key in self._known:
                return self._known[key]
        except TypeError:  # an argument cannot be a key
            key = None
        _refuse_values(func)
        args, kwargs = tree_unflatten([_on_meta(leaf) for leaf in leaves], spec)
        try:
            made = func(*args, **kwargs)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"the shapes that {func} returns are not known without computing it ({error}): "
                "give a model whose operations PyTorch can run on the meta device"
            ) from error
        made = _described(made)
        if key is not None:
            self._known[key] = made
        return made


@cache
def touches_nothing(func: Any) -> bool:
    """Whether an operation returns a view, or memory as it comes."""
    infos = [item.alias_info for item in func._schema.returns]
    if any(info is not None and not info.is_write for info in infos):
        return True
    return _is_empty(func) or func._schema.name in _IN_PLACE


@cache
def _may_grow(func: Any) -> bool:
    """Whether an operation only makes new tensors, which may be larger than those it takes."""
    schema = func._schema
    return bool(schema.returns) and not any(
        item.alias_info is not None for item in (*schema.arguments, *schema.returns)
    )


@cache
def _is_empty(func: Any) -> bool:
    """Whether an operation returns new memory as it comes."""
    return "empty" in func._schema.name


def _refuse_values(func: Any) -> None:
    if _NEEDS_VALUES & set(func.tags):
        raise UnsupportedError(
            f"{func} depends on the values of a large tensor, and only shapes are computed: give a "
            "model without such control flow, or measure it on ranks that are there"
        )


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that an operation writes, by the names that its schema gives their memory."""
    written: dict[str, Any] = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written |= dict.fromkeys(argument.alias_info.before_set, value)
    return written


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _Made(tuple(leaf.shape), leaf.stride(), leaf.dtype)
    return type(leaf), leaf  # or 1, 1.0 and True would be one key


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
    return _META if isinstance(leaf, torch.device) else leaf


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Made(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return value
