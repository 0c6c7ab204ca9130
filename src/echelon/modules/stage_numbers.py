"""Numbers that were computed from the gradient of one parameter in a stage of a pipeline.

A script sums squares of all gradients, to clip by their norm or to balance losses. In a pipeline a
rank would sum those of its own stages, and every rank would go on with another number. A number
therefore knows its gradient, and the sum over several of them is refused. So is a sum that begins
with 0, as that of Python does: a stage may have a single parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.errors import UnsupportedError
from echelon.modules.sharded_arithmetic import functions
from echelon.modules.sharded_tensor import call_plain, unmarked


class StageNumber(Tensor):
    """A number of one gradient.

    Attributes:
        _source: what tells this gradient from others.
        _is_total: whether it is the beginning of a sum over gradients.
    """

    _source: int
    _is_total: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func in _JOINS:
            if len({number._source for number in _numbers_in(args[0])}) > 1:
                raise sum_of_stages()
            return call_plain(func, args, named)
        numbers = _numbers_in(args)
        if func in _TEXTS:
            return func(unmarked(args[0]), *args[1:], **named)
        if getattr(func, "__name__", "") == "__get__" or not numbers:
            return call_plain(func, args, named)
        is_sum = func in _ADDS
        if len({number._source for number in numbers}) > 1 and is_sum:
            raise sum_of_stages()
        if not is_sum and any(number._is_total for number in numbers):
            raise sum_of_stages()
        result = call_plain(func, args, named)
        is_total = is_sum and any(not isinstance(arg, Tensor) and arg == 0 for arg in args)
        return as_number(result, numbers[0]._source, is_total=is_total or numbers[0]._is_total)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unmarked(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(unmarked(self), memo)


def as_number(value: Any, source: int, *, is_total: bool = False) -> Any:
    """The same number, which knows its gradient; whatever else it is is returned as it is."""
    if not (isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()):
        return value
    number = unmarked(value).as_subclass(StageNumber)
    number._source, number._is_total = source, is_total
    return number


def _numbers_in(values: Any) -> list[StageNumber]:
    if isinstance(values, StageNumber):
        return [values]
    if not isinstance(values, list | tuple):
        return []
    return [number for value in values for number in _numbers_in(value)]


def sum_of_stages() -> UnsupportedError:
    """The error for what is summed over the gradients of this rank's stages."""
    return UnsupportedError(
        "a sum over the gradients of several parameters, of which this rank has only those of its "
        "stages, so every rank would go on with another number: to clip, call "
        "ec.clip_grad_norm_(model, max_norm) on all ranks; with math.inf it only measures. For "
        "this rank's own stages take ec.local_shard(param.grad), which is a plain tensor"
    )


def finite_in_stages() -> UnsupportedError:
    """The error for a check by torch's ``GradScaler`` of the gradients of this rank's stages."""
    return UnsupportedError(
        "torch's GradScaler looks at the gradients of this rank's stages only, so one rank of the "
        "pipeline would step and another skip: take ec.GradScaler, or ec.FiniteGuard, which ask "
        "all ranks"
    )


_JOINS = frozenset(functions("stack cat hstack vstack", torch))
_ADDS = frozenset(
    [*functions("add"), *functions("__add__ __radd__ __iadd__ add_", Tensor)],
)
_TEXTS = frozenset(functions("__repr__ __format__", Tensor))
