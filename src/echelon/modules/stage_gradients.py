"""Gradients of the stages of one rank of a pipeline, and numbers of them.

Other ranks have the gradients of other stages. A number of one gradient, such as its norm or its
largest magnitude, is that of the plain model. The sum of such numbers is one of this rank's stages
alone, and a rank that clips by it clips by another number than the others. So what is computed from
a gradient remembers its parameter: adding or comparing numbers of two parameters is refused, and so
is a number of a tensor in which gradients of two are joined or added.

[Note: what is not refused]
``item()`` and ``float()`` give plain numbers of Python, whose sums nobody sees. Differences, ratios
and products of two gradients pass: they are also those of one parameter in two models. So do sums
of elements that are taken from a joined tensor, and gradients that are copied one by one into
slices of a plain tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from echelon.errors import UnsupportedError
from echelon.modules.memory_writes import tensors_in
from echelon.modules.sharded_arithmetic import functions, is_called_by
from echelon.modules.sharded_tensor import call_plain, name_of, unmarked


class _OfAStage(Tensor):
    """What the classes have in common: copies and files have plain tensors.

    ``_source`` is the id of the parameter of whose gradient it is; that of one of several.
    """

    _source: int | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unmarked(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(unmarked(self), memo)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Functions of torch that are written in Python also name the class of plain tensors.
        if not all(kind is Tensor or issubclass(kind, _OfAStage) for kind in types):
            return NotImplemented  # the rules of parts, and of norms, know what to do
        if func in _NORMS and is_called_by("torch.nn.utils.clip_grad"):
            refuse_joined("the norm")  # even of one: other ranks may have several
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            refuse_torch_scaler()
        return _call(func, args, kwargs or {})


class StageGradient(_OfAStage):
    """A whole gradient of a stage of a pipeline, or a tensor that was computed from one."""


class JoinedStages(StageGradient):
    """Gradients of several parameters, or numbers of them, in one tensor."""


class StageNumber(_OfAStage):
    """A number of one gradient of a stage."""


def number_of_stage(value: Any, source: int | None) -> Any:
    """Mark a floating-point number of one gradient of a stage; other values stay as they are."""
    if type(value) is Tensor and value.numel() == 1 and value.is_floating_point():
        _mark(value, StageNumber, source)
    return value


def refuse_joined(what: str) -> NoReturn:
    """Raise the error for a number of several gradients of this rank's stages."""
    raise UnsupportedError(
        f"{what} of several gradients, of which this rank has only those of its stages, is not "
        "that of the model, and every rank would go on with another one: call "
        "ec.clip_grad_norm_(model, max_norm) on all ranks; with math.inf it only measures. "
        "ec.local_shard(parameter.grad) is a plain tensor, for sums of this rank's stages alone"
    )


def refuse_torch_scaler() -> NoReturn:
    """Raise the error for the check of ``GradScaler``, which asks only about this rank's stages."""
    raise UnsupportedError(
        "torch's GradScaler looks at the gradients of this rank's stages only, so one rank of the "
        "pipeline would step and another skip: take ec.GradScaler, or ec.FiniteGuard, which ask "
        "all ranks"
    )


# Calls ---------------------------------------------------------------------------------------


def _call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function of torch, in which tensors are marked."""
    given = list(tensors_in((args, kwargs)))
    has_numbers = any(isinstance(tensor, StageNumber) for tensor in given)
    if has_numbers and func in _ADDING and _joins(func, given):
        refuse_joined(f"{name_of(func)}()")
    result = call_plain(func, args, kwargs)
    if func in _WRITING:
        _mark_written(func, given)
    elif name_of(func).startswith("_foreach_"):
        for i, tensor in enumerate(result or ()):
            of_it = [arg[i] if isinstance(arg, list | tuple) else arg for arg in args]
            _mark_new(func, tensor, list(tensors_in(of_it)))
    elif name_of(func) != "_base":  # an attribute that is no new tensor
        for tensor in tensors_in(result):
            _mark_new(func, tensor, given)
    return result


def _joins(func: Callable[..., Any], given: Sequence[Tensor]) -> bool:
    """Whether the result is of several gradients."""
    marked = [tensor for tensor in given if isinstance(tensor, _OfAStage)]
    if any(isinstance(tensor, JoinedStages) for tensor in marked):
        return True
    if func in _JOINING and any(isinstance(tensor, StageNumber) for tensor in marked):
        return True  # of one, too: a vector of norms is made to take their norm
    may_join = func in _ADDING or func in _JOINING or func is Tensor.__setitem__
    return may_join and len({tensor._source for tensor in marked}) > 1


def _mark_new(func: Callable[..., Any], result: Tensor, given: Sequence[Tensor]) -> None:
    """Mark a tensor that a function has made."""
    marked = [tensor for tensor in given if isinstance(tensor, _OfAStage)]
    if not marked or type(result) is not Tensor or any(result is tensor for tensor in given):
        return
    if not (result.is_floating_point() or result.is_complex()):
        return
    gradients = [tensor for tensor in marked if isinstance(tensor, StageGradient)]
    source, joins = (gradients or marked)[0]._source, _joins(func, given)
    shrinks = func in _REDUCING or all(gradient.numel() > 1 for gradient in gradients)
    if result.numel() == 1 and shrinks and not (joins and func in _TAKING):
        if joins:
            refuse_joined(f"{name_of(func)}()")
        _mark(result, StageNumber, source)
    elif gradients or joins:  # a number times a plain tensor stays plain
        _mark(result, JoinedStages if joins else StageGradient, source)


def _mark_written(func: Callable[..., Any], given: Sequence[Tensor]) -> None:
    """Mark the first of these tensors, into which a gradient or a number was written.

    With a number, that of which it is a view is marked, too: ``norms[i].copy_(norm)``.
    """
    target, joins = given[0], _joins(func, given)
    marked = [tensor for tensor in given if isinstance(tensor, _OfAStage)]
    gradients = [tensor for tensor in marked if isinstance(tensor, StageGradient)]
    if gradients:
        if type(target) is Tensor or (joins and isinstance(target, StageGradient)):
            _mark(target, JoinedStages if joins else StageGradient, gradients[0]._source)
        return
    with DisableTorchFunctionSubclass():
        base = target._base
    for written in (target, base):
        if type(written) is Tensor:
            _mark(written, JoinedStages if written.numel() > 1 else StageNumber, marked[0]._source)


def _mark(tensor: Tensor, kind: type[_OfAStage], source: int | None) -> None:
    tensor.__class__ = kind  # in place: it may be what a script adds to
    cast(_OfAStage, tensor)._source = source


_NORMS = frozenset(
    (
        *functions("norm", torch, torch.functional, torch.linalg, Tensor),
        torch.linalg.vector_norm,
        torch._foreach_norm,
    )
)
_JOINING = frozenset(functions("cat concat concatenate stack hstack vstack", torch))
# Differences, ratios and products are also those of the gradients of two models.
_ADDING = frozenset(
    (
        *functions("add add_ maximum minimum fmax fmin max min hypot hypot_ logaddexp logaddexp2"),
        *functions("addcmul addcmul_ lerp lerp_ lt le gt ge less greater"),
        *functions("__add__ __radd__ __iadd__ __lt__ __le__ __gt__ __ge__", Tensor),
    )
)
_REDUCING = frozenset(functions("sum nansum mean prod max min amax amin std var dot vdot"))
_TAKING = frozenset(
    functions(
        "__getitem__ select unbind chunk split tensor_split narrow index_select masked_select take"
    )
)
_WRITING = frozenset(
    functions(
        "__setitem__ __iadd__ __isub__ copy_ fill_ add_ sub_ lerp_ addcmul_ addcdiv_ hypot_ "
        "masked_fill_ masked_scatter_ index_fill_ index_copy_ index_add_ index_put_ scatter_"
    )
)
