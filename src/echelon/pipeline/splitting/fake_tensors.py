"""Tensors of which this rank has the shape and not the values, and what comes of using them.

[Note: values that are not there]
A stage in the middle of a model runs the model's own ``forward``, with the real parts on this rank
only. What comes before them works on ``Absent`` tensors, which lie on the meta device and cost
nothing. Meta tensors alone would not do: ``F.linear(real, meta)`` and ``real.add_(meta)`` give
numbers out of nothing, without an error. So here absence spreads: whatever is computed with an
absent operand is absent, and to write it into a real tensor is an error. A result that is real
therefore cannot depend on a value that was not there.

[Note: the same absence again]
A stage runs the model's forward for every microbatch, and most of what comes before its blocks is
absent: shapes in, shapes out, the same each time. So the outcome of an operation is remembered by
its place in the forward, its function, and its operands: an absent one is itself, for it has
nothing but a shape; a real one is its shape, dtype, strides and device, for nothing else of it can
reach an absent outcome; a plain value is its value. The place keeps apart what two equal
calls give, which is not the same where a real operand or a random number is in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.errors import UnsupportedError

_MOST = 4096  # outcomes; a model of ever new shapes begins again from there
_PLAIN = (
    bool,
    int,
    float,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@final
class Recall:
    """The outcomes of one stage; whether they are there or not, the stage computes the same."""

    def __init__(self) -> None:
        self._outcomes: dict[Hashable, Any] = {}
        self._held: dict[int, Any] = {}  # tensors by identity, which no other gets while they live
        self._standing: dict[int, Any] | None = None  # those of modules that the stage lacks
        self._place = 0
        self._is_on = True

    def begin(self) -> None:
        """A forward begins."""
        self._place = 0
        if self._standing is None:
            self._standing = dict(self._held)
        if len(self._outcomes) > _MOST:
            self._forget()

    def stop(self) -> None:
        """An absent tensor was written, so it is no longer what it was: remember nothing more."""
        self._is_on = False
        self._forget()

    def _forget(self) -> None:
        self._outcomes.clear()
        self._held = dict(self._standing or {})

    def hold(self, tensor: Tensor) -> None:
        """``tensor`` is absent, and will be an operand again."""
        self._held[id(tensor)] = tensor

    def made(self, plain: Sequence[Any], make: Callable[[], Any]) -> Any:
        """What ``make`` gives, once for all plain values that are equal to these."""
        try:
            key = "made", self._form(plain)
        except _Unknown:
            return make()
        if not self._is_on:
            return make()
        if key not in self._outcomes:
            self._outcomes[key] = make()
        return self._outcomes[key]

    def key(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Hashable | None:
        """Under which the outcome of the next operation is remembered; None if it is not."""
        self._place += 1
        if not self._is_on:
            return None
        try:
            named = self._form(tuple(kwargs.items())) if kwargs else None
            return self._place, func, self._form(args), named
        except _Unknown:
            return None

    def find(self, key: Hashable | None) -> tuple[Any] | None:
        """The outcome, in a tuple; None if there is none."""
        return None if key is None else self._outcomes.get(key)

    def keep(self, key: Hashable | None, outcome: Any) -> None:
        """Remember an outcome, if it is such that nobody can change it."""
        parts = outcome if isinstance(outcome, tuple) else (outcome,)
        if key is None or not all(one is None or isinstance(one, _KEPT) for one in parts):
            return
        for one in parts:
            if isinstance(one, Tensor):
                self.hold(one)
        self._outcomes[key] = (outcome,)

    def _form(self, value: Any) -> Hashable:
        kind = type(value)
        if id(value) in self._held:  # absent
            return id(value)
        if kind in _PLAIN or value is None or value is ...:
            return kind, value
        if kind in (tuple, list, torch.Size):
            return kind, tuple([self._form(one) for one in value])
        if kind in (Tensor, torch.nn.Parameter):
            return value.shape, value.dtype, value.stride(), value.device
        if kind is slice:
            return slice, self._form((value.start, value.stop, value.step))
        raise _Unknown


_KEPT = (Tensor, *_PLAIN)


class _Unknown(Exception):
    """An operand that cannot be told from another."""


_META = torch.device("meta")
_STAYS = {"cpu", "cuda", "xpu"}  # methods that move a tensor to the device that it seems to be on


class NeedsValues(UnsupportedError):
    """An operation on absent tensors, of which torch does not know the shape of the result."""


@final
class Absent(Tensor):
    """A tensor without values. See the note above.

    Attributes:
        seems_on: the device that it says it is on, so that what is made beside it is real.
        missing: names of what it was computed from and is not there.
        recall: what came of the same operations before.
    """

    seems_on: torch.device
    missing: frozenset[str]
    recall: Recall

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        return self  # there is nothing in it that a copy could change

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE:
            seems_on: torch.device = vars(args[0])["seems_on"]
            return seems_on
        recall = _recall_of(args) or _recall_of(pytree.tree_leaves((args, kwargs)))
        assert recall is not None, "else this would not be called"
        key = recall.key(func, args, kwargs)
        before = recall.find(key)
        if before is not None:
            return before[0]
        found = _outcome(func, args, kwargs)
        recall.keep(key, found)
        return found


def _recall_of(values: Iterable[Any]) -> Recall | None:
    """That of the first absent tensor; most operations have one among their arguments."""
    for value in values:
        if type(value) is Absent:
            recall: Recall = vars(value)["recall"]
            return recall
    return None


def _outcome(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    absent = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Absent)]
    first, name = vars(absent[0]), getattr(func, "__name__", "")
    if name in _STAYS:
        return args[0]
    _check_target(name, args, kwargs, first["recall"])
    args, kwargs = pytree.tree_map(_without_values, (args, kwargs))
    if name == "to":
        args = tuple(_META if isinstance(one, str) else one for one in args)
    if "device" in kwargs:
        kwargs["device"] = _META
    missing = frozenset[str]().union(*(vars(one)["missing"] for one in absent))
    try:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise NeedsValues(
            f"{name}() depends on {sorted(missing)}, which other stages have, and cannot run by "
            f"shapes alone ({type(error).__name__}: {error})"
        ) from error

    def mark(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not isinstance(leaf, Absent):
            return _mark(leaf, first["seems_on"], missing, first["recall"])
        return leaf

    return pytree.tree_map(mark, found)


_DEVICE = Tensor.device.__get__


def _mark(
    tensor: Tensor, seems_on: torch.device, missing: frozenset[str], recall: Recall
) -> Absent:
    with torch._C.DisableTorchFunctionSubclass():
        marked: Absent = Tensor._make_subclass(Absent, tensor.detach().to(_META))
    vars(marked).update(seems_on=seems_on, missing=missing, recall=recall)
    return marked


def _without_values(leaf: Any) -> Any:
    """The same on the meta device."""
    if isinstance(leaf, torch.device):
        return _META
    if isinstance(leaf, Tensor) and not isinstance(leaf, Absent):
        return leaf.detach().to(_META)
    return leaf


def _check_target(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], recall: Recall) -> None:
    """A real tensor would keep its old values where absent ones are to be written."""
    writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    target = kwargs.get("out", args[0] if writes and args else None)
    for leaf in pytree.tree_leaves(target):
        if isinstance(leaf, Tensor) and not isinstance(leaf, Absent):
            raise UnsupportedError(
                f"{name or 'an operation'} writes into a tensor of this stage what only a stage "
                "before it has: compute it without changing a tensor in place, or let the model "
                "say its layers with pipeline_layers()"
            )
    if target is not None:
        recall.stop()


_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


def absent_like(
    shape: Iterable[int], dtype: torch.dtype, seems_on: torch.device, name: str, recall: Recall
) -> Absent:
    """A tensor of this shape, without values.

    Args:
        name: what it is, in errors.
        recall: of the stage that lacks it.
    """
    empty = torch.empty(tuple(shape), dtype=dtype, device=_META)
    absent = _mark(empty, seems_on, frozenset([name]), recall)
    recall.hold(absent)
    return absent


def absent_copy(module: nn.Module, name: str, recall: Recall) -> nn.Module:
    """A copy of a submodule that computes shapes only and shares nothing that has values.

    Its tensors are no ``nn.Parameter``, so no optimizer finds them.
    """
    memo: dict[int, Any] = {
        id(tensor): absent_like(
            tensor.shape, tensor.dtype, tensor.device, f"{name}.{local}", recall
        )
        for local, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    return copy.deepcopy(module, memo)


def missing_in(value: Any) -> list[str]:
    """Names of what the absent tensors in ``value`` were computed from."""
    leaves = pytree.tree_leaves(value)
    return sorted({name for leaf in leaves if isinstance(leaf, Absent) for name in leaf.missing})
