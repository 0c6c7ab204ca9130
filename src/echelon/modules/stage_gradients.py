"""Gradients of the stages of one rank of a pipeline, and numbers of them.

Other ranks have the gradients of other stages. A number of one gradient, such as its norm or its
largest magnitude, is that of the plain model. The sum of such numbers is a number of this rank's
stages alone, and a rank that clips by it clips by another number than the others. So the numbers
say that they are numbers of one gradient, also as Python's, and adding or comparing two is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from echelon.errors import UnsupportedError
from echelon.modules.sharded_arithmetic import functions
from echelon.modules.sharded_tensor import Rule, call_plain, name_of, unmarked

_INSTEAD = "call ec.clip_grad_norm_(model, max_norm) on all ranks; with math.inf it only measures"

# By function of torch; ``sharded_norms`` adds those of norms.
STAGE_RULES: dict[Callable[..., Any], Rule] = {}


class _IsOfAStage(Tensor):
    """What the classes have in common: copies and files have plain tensors."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unmarked(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(unmarked(self), memo)


class StageGradient(_IsOfAStage):
    """A whole gradient of a stage of a pipeline; other ranks have those of other stages.

    ``_source`` is the id of its parameter, where that is known.
    """

    _source: int | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not all(issubclass(kind, _IsOfAStage) for kind in types):
            return NotImplemented  # the rules of parts, and of norms, know what to do
        rule = STAGE_RULES.get(func, _derived)
        if {JoinedStages, StageNumber}.issubset(types) and func not in _OVERWRITING:
            refuse_joined(f"{name_of(func)}()")
        named = dict(kwargs or {})
        return rule(func, args or (named.pop(next(iter(named))),), named)


class JoinedStages(StageGradient):
    """Several gradients of stages, or numbers of them, in one tensor."""


class StageNumber(_IsOfAStage):
    """A number of one gradient of a stage, that of the parameter with the id ``_source``."""

    _source: int | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if any(kind is not cls for kind in types):
            return NotImplemented  # the rules of gradients, and of their norms, know what to do
        if func in _JOINING:
            return _joined(func, args, named)
        numbers = [v for v in (*args, *named.values()) if isinstance(v, StageNumber)]
        if func in _ADDING:  # ratios and products are also those of gradients of two models
            _check_one_source(numbers)
        result = call_plain(func, args, named)
        if func is Tensor.__setitem__ or func.__name__.endswith("_"):
            _mark_written(args[0])
        return number_of_stage(result, _source_of(numbers))


def number_of_stage(value: Any, source: int | None) -> Any:
    """Mark a floating-point number of one gradient of a stage; other values stay as they are."""
    if type(value) is Tensor and value.numel() == 1 and value.is_floating_point():
        value.__class__ = StageNumber  # in place: it may be what a script adds to
        cast(StageNumber, value)._source = source
    return value


def _mark_written(target: Tensor) -> None:
    """Mark a plain tensor, and that of which it is a view, into which a number was written."""
    with DisableTorchFunctionSubclass():
        for written in (target, target._base):
            if type(written) is Tensor and written.numel() > 1:
                written.__class__ = JoinedStages


def _source_of(numbers: Sequence[Any]) -> int | None:
    """The parameter of whose gradient all of these are; None if that is not known."""
    sources = {number._source for number in numbers}
    return sources.pop() if len(sources) == 1 else None


def _check_one_source(numbers: Sequence[StageNumber]) -> None:
    if len(numbers) > 1 and _source_of(numbers) is None:
        raise UnsupportedError(
            "a sum or a comparison of numbers of two gradients, of which this rank has only those "
            "of its stages, is not that of the model, and every rank would go on with another "
            f"one: {_INSTEAD}. ec.local_shard(parameter.grad) is a plain tensor, for sums of this "
            "rank's stages alone"
        )


def refuse_joined(what: str) -> NoReturn:
    """Raise the error for a number of several gradients of this rank's stages."""
    raise UnsupportedError(
        f"{what} of a tensor with several gradients, of which this rank has only those of its "
        f"stages: {_INSTEAD}"
    )


def norm_of_stages() -> UnsupportedError:
    """The error for the norm of all gradients of this rank's stages."""
    return UnsupportedError(
        "the norm of the gradients of this rank's stages is not that of the model, and every rank "
        f"would clip by another number: {_INSTEAD}"
    )


def finite_in_stages() -> UnsupportedError:
    """The error for a check by torch's ``GradScaler`` of the gradients of this rank's stages."""
    return UnsupportedError(
        "torch's GradScaler looks at the gradients of this rank's stages only, so one rank of the "
        "pipeline would step and another skip: take ec.GradScaler, or ec.FiniteGuard, which ask "
        "all ranks"
    )


# Rules ---------------------------------------------------------------------------------------


def _marked_again(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result, marked if it is a new tensor of the size of the gradient of a stage."""
    result = call_plain(func, args, kwargs)
    if type(result) is Tensor:
        marked = _gradients_in(args)
        if result.numel() in {gradient.numel() for gradient in marked}:
            joined = any(isinstance(gradient, JoinedStages) for gradient in marked)
            result.__class__ = JoinedStages if joined else StageGradient
            cast(StageGradient, result)._source = _source_of(marked)
    return result


def _item(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A part of a gradient, or one of several numbers, which more may be added to."""
    result = call_plain(func, args, kwargs)
    if type(result) is Tensor and isinstance(args[0], JoinedStages):
        result.__class__ = JoinedStages
    return result


def _derived(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of any other function, which may be a number of the gradient."""
    result = _marked_again(func, args, kwargs)
    is_number = type(result) is Tensor and result.numel() == 1 and result.is_floating_point()
    return _number(func, args, result) if is_number else result


def _joined(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Several gradients of stages, or numbers of them, in one tensor."""
    result = call_plain(func, args, kwargs)
    if type(result) is Tensor:  # and not written into a tensor that was given
        result.__class__ = JoinedStages if len(args[0]) > 1 else StageGradient
        source = getattr(args[0][0], "_source", None) if len(args[0]) == 1 else None
        cast(StageGradient, result)._source = source
    return result


def _reduced(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A number of one gradient."""
    result = call_plain(func, args, kwargs)
    if not isinstance(result, Tensor) or result.dim():
        return result
    return _number(func, args, result)


def _number(func: Callable[..., Any], args: Sequence[Any], result: Tensor) -> Any:
    gradients = _gradients_in(args)
    if any(isinstance(gradient, JoinedStages) for gradient in gradients):
        refuse_joined(f"{name_of(func)}()")
    return number_of_stage(result, _source_of(gradients))


def _scaled(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``GradScaler``'s check, which says nothing of the gradients of other stages."""
    raise finite_in_stages()


def _gradients_in(args: Sequence[Any]) -> list[StageGradient]:
    return [gradient for gradient in args if isinstance(gradient, StageGradient)]


_KEEPING = (
    *functions("detach to float double half bfloat16 cpu contiguous", Tensor),
    *functions("view reshape flatten ravel view_as reshape_as", Tensor),
    *functions("mul multiply div divide true_divide add sub subtract neg negative"),
    *functions("abs absolute square pow sqrt clamp nan_to_num sign where lerp"),
    *functions("__mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ __rsub__ __neg__", Tensor),
    *functions("__pow__ __abs__", Tensor),
    Tensor.data.__get__,  # type: ignore[attr-defined]
)
_OVERWRITING = frozenset((*functions("copy_ fill_", Tensor), Tensor.__setitem__))
_JOINING = frozenset(functions("cat concat concatenate stack hstack", torch))
_ADDING = frozenset(
    (
        *functions("add add_ maximum minimum fmax fmin max min hypot hypot_ logaddexp logaddexp2"),
        *functions("addcmul addcmul_ lerp lerp_ lt le gt ge less greater"),
        *functions("__add__ __radd__ __iadd__ __lt__ __le__ __gt__ __ge__", Tensor),
    )
)
STAGE_RULES |= {
    **dict.fromkeys(_JOINING, _joined),
    **dict.fromkeys(_KEEPING, _marked_again),
    **dict.fromkeys(functions("clone"), _marked_again),
    Tensor.__getitem__: _item,
    **dict.fromkeys(functions("sum nansum mean prod max min amax amin std var dot vdot"), _reduced),
    torch._amp_foreach_non_finite_check_and_unscale_: _scaled,
}
