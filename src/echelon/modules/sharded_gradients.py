"""Gradients that know that they are shards, so that their norm is that of the full gradient.

``torch.nn.utils.clip_grad_norm_``, and all code like it, takes norms of ``.grad``. With plain
tensors every rank would get the norm of its own shards, and silently clip by another number than
the other ranks.

[Note: the cost of a norm]
A ``ShardedGradient`` is the memory of a gradient under another Python class. Operators run on it as
on any tensor; only Python calls pass through ``__torch_function__``, some microseconds each. A norm
is combined over the ranks of the group, all of which take it. ``torch.nn.utils`` uses the norms of
single gradients only for the norm of all of them. There the norms of shards stay pending, and one
collective combines all.

[Note: which results are still a gradient]
A result of the size of the gradient that was computed elementwise is a shard of the full result. So
it is marked again, and ``.grad`` may be replaced by it. All other results, such as sums over a
shard, are plain tensors of this rank.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from echelon.errors import UnsupportedError
from echelon.modules.norms import ReducingRanks, norms_over_ranks

_CLIP = "torch.nn.utils.clip_grad"  # uses only the norm of all gradients
_OPTIMIZERS = "torch.optim"
_MAX_FRAMES = 8  # between that module and this one, for modes of torch and of simulated ranks
_LABEL = "norms of gradients, which all ranks take"
_INSTEAD = "call ec.clip_grad_norm_(model, max_norm) on all ranks; with math.inf it only measures"


@final
@dataclass(frozen=True, slots=True)
class GradientScope:
    """Which ranks have the other shards of a gradient, and whether ranks have other gradients.

    Attributes:
        group: the ranks that have shards of it; None where each rank has the full gradient.
        by_rows: whether shards are whole rows of dim 0, and not ranges of the flattened gradient.
        is_staged: whether other ranks have gradients of other stages of a pipeline.
        is_joined: whether this is several gradients in one tensor, of which the ranks have not all
            the same shards.
    """

    group: ReducingRanks | None = None
    by_rows: bool = False
    is_staged: bool = False
    is_joined: bool = False


class ShardedGradient(Tensor):
    """A gradient of which this rank has a shard, or which belongs to a stage of a pipeline."""

    _scope: GradientScope

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = _RULES.get(func)
        if rule is None:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        named = dict(kwargs or {})
        return rule(func, args or (named.pop(next(iter(named))),), named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unmarked(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(unmarked(self), memo)


class _PendingNorms(Tensor):
    """Norms of gradients inside of ``clip_grad_norm_``, which ranks have not combined yet.

    Attributes:
        _order: the order of the norms.
        _scopes: the scope of each norm; None for that of a plain tensor.
        _is_stacked: whether this is a 1D tensor of norms.
    """

    _order: float
    _scopes: tuple[GradientScope | None, ...]
    _is_stacked: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = args[0] if args else None
        if func is torch.stack and isinstance(first, list | tuple):
            return _stacked(first, kwargs or {})
        if func in _MOVES and isinstance(first, _PendingNorms):
            return _pending(_call_plain(func, args, kwargs or {}), first._order, first._scopes)
        if func in _NORMS and isinstance(first, _PendingNorms) and first._is_stacked:
            first.check_all_stages()
        if getattr(func, "__name__", "") == "__get__":  # such as ``device``
            return _call_plain(func, args, kwargs or {})
        return _call_plain(func, _finished(args), _finished(kwargs or {}))

    def check_all_stages(self) -> None:
        """Refuse a norm of the gradients of this rank's stages only."""
        if any(scope is not None and scope.is_staged for scope in self._scopes):
            raise _norm_of_stages()


def mark(gradient: Tensor, scope: GradientScope) -> ShardedGradient:
    """The same memory, as a gradient of ``scope``."""
    marked = unmarked(gradient).as_subclass(ShardedGradient)
    marked._scope = scope
    return marked


def mark_stage_gradients(gradients: Iterable[Tensor]) -> None:
    """Mark the gradients of this rank's stages; other ranks have those of other stages.

    This is done in place, so that ``.grad`` stays the same object.
    """
    for gradient in gradients:
        if type(gradient) is Tensor:
            gradient.__class__ = ShardedGradient
            gradient._scope = _STAGED  # type: ignore[attr-defined]
        elif isinstance(gradient, ShardedGradient) and not gradient._scope.is_staged:
            gradient._scope = replace(gradient._scope, is_staged=True)


def unmarked(tensor: Tensor) -> Tensor:
    """The same memory as a plain tensor."""
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


_STAGED = GradientScope(is_staged=True)


def _call_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


# What stays marked ---------------------------------------------------------------------------


def _is_called_by(module: str) -> bool:
    """Whether code of this module of torch, or of a submodule, has called this file."""
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if f"{frame.f_globals.get('__name__')}.".startswith(f"{module}."):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _functions(names: str, *owners: Any) -> Iterator[Callable[..., Any]]:
    for name in names.split():
        for owner in owners or (torch, Tensor):
            if hasattr(owner, name):
                yield getattr(owner, name)


def _marked_again(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result, marked if it is a new tensor of the size of the gradient."""
    result = _call_plain(func, args, kwargs)
    if type(result) is not Tensor:
        return result
    gradients = [arg for arg in args if isinstance(arg, ShardedGradient)]
    scopes = {gradient._scope for gradient in gradients}
    sizes = {gradient.numel() for gradient in gradients}
    return mark(result, scopes.pop()) if len(scopes) == 1 and result.numel() in sizes else result


def _joined(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Several gradients in one tensor; of shards of the same ranks it is a shard, too."""
    result = _call_plain(func, args, kwargs)
    if type(result) is not Tensor:
        return result  # written into a tensor that was given
    scopes = {t._scope if isinstance(t, ShardedGradient) else None for t in args[0]}
    scope = next(scope for scope in scopes if scope is not None)
    is_alone = len(args[0]) == 1
    is_shard = len(scopes) == 1 and not scope.is_staged
    return mark(result, replace(scope, by_rows=False, is_joined=not (is_shard or is_alone)))


def _cloned(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A copy, marked again unless an optimizer makes it, for its state such as a momentum."""
    if _is_called_by(_OPTIMIZERS):
        return _call_plain(func, args, kwargs)
    return _marked_again(func, args, kwargs)


# Norms ---------------------------------------------------------------------------------------


def _order_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The order of a norm; an UnsupportedError if it is not that of the gradient as a vector."""
    named = {**dict(zip(_NORMS[func], args[1:], strict=False)), **kwargs}
    order = named.pop("ord", named.pop("p", None))
    of_matrix = func is torch.linalg.norm and order is not None
    order = 2.0 if order in (None, "fro") else order
    named.pop("dtype", None)
    named.pop("foreach", None)
    shaped = {
        key: value for key, value in named.items() if value is not None and value is not False
    }
    if shaped or of_matrix or not isinstance(order, int | float) or order <= 0:
        options = ", ".join(f"{key}={value!r}" for key, value in {"ord": order, **shaped}.items())
        raise UnsupportedError(
            f"a norm with {options:.80} of a gradient of which this rank has a shard, which is no "
            "matrix of the model's: take the norm of all of the gradient, or put it together first "
            "(shard_info(name) says where shards lie). An optimizer that needs whole matrices "
            "cannot train a sharded model"
        )
    return float(order)


def _norm(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The norm of one gradient, or of each of its rows."""
    gradient = args[0]
    if not isinstance(gradient, ShardedGradient):
        return _call_plain(func, args, kwargs)
    scope = gradient._scope
    if scope.is_joined:
        raise UnsupportedError(
            "a norm of a tensor with several gradients, of which this rank has all of some and "
            f"shards of others, or only those of its stages: {_INSTEAD}"
        )
    if scope.by_rows and _is_by_rows(func, args, kwargs):
        return _call_plain(func, args, kwargs)
    if scope.group is None:  # a full gradient of a stage
        norm = _call_plain(func, args, kwargs)
        order = 2.0
    else:
        order = _order_of(func, args, kwargs)
        dtype = kwargs.get("dtype")
        norm = _norm_of_shard(gradient, order, dtype)
    if _is_called_by(_CLIP):
        if scope.is_staged:
            raise _norm_of_stages()
        return _pending(norm, order, (scope,))
    if scope.group is not None:
        norm = _over_ranks([norm], order, scope)[0]
    return _pending(norm, order, (_STAGED,)) if scope.is_staged and not norm.dim() else norm


def _is_by_rows(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the norm is along dims that no rank has a part of."""
    dims = kwargs.get("dim", dict(zip(_NORMS[func], args[1:], strict=False)).get("dim"))
    dims = (dims,) if isinstance(dims, int) else dims or ()
    num_dims = unmarked(args[0]).dim()
    return bool(dims) and all(dim % max(num_dims, 1) != 0 for dim in dims)


def _foreach_norm(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The norm of each of several gradients; one collective for each scope."""
    gradients = list(args[0])
    scopes = [g._scope if isinstance(g, ShardedGradient) else None for g in gradients]
    if _is_called_by(_CLIP) and any(scope is not None and scope.is_staged for scope in scopes):
        raise _norm_of_stages()
    order = _order_of(func, args, kwargs)
    norms = [
        _norm_of_shard(gradient, order, kwargs.get("dtype"))
        if isinstance(gradient, ShardedGradient)
        else torch.linalg.vector_norm(gradient, order, dtype=kwargs.get("dtype"))
        for gradient in gradients
    ]
    return _complete(norms, order, scopes)


def _norm_of_shard(gradient: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    shard = unmarked(gradient).detach()
    # torch refuses the largest magnitude of an empty tensor.
    norm: Tensor = torch.linalg.vector_norm(shard, order if shard.numel() else 2.0, dtype=dtype)
    return norm


def _over_ranks(norms: Sequence[Tensor], order: float, scope: GradientScope) -> list[Tensor]:
    """The norms of full gradients from those of shards. All ranks of the scope call it."""
    assert scope.group is not None
    shards = torch.stack([norm.double().to(scope.group.device) for norm in norms])
    complete = norms_over_ranks(shards, order, scope.group, _LABEL)
    return [total.to(norm) for total, norm in zip(complete.unbind(), norms, strict=True)]


def _norm_of_stages() -> UnsupportedError:
    return UnsupportedError(
        "the norm of the gradients of this rank's stages is not that of the model, and every rank "
        f"would clip by another number: {_INSTEAD}"
    )


# Norms of norms ------------------------------------------------------------------------------


def _pending(
    values: Tensor, order: float, scopes: tuple[GradientScope | None, ...]
) -> _PendingNorms:
    plain = unmarked(values)
    norms: _PendingNorms = plain.as_subclass(_PendingNorms)
    norms._order, norms._scopes, norms._is_stacked = order, scopes, plain.dim() == 1
    return norms


def _stacked(norms: Sequence[Tensor], kwargs: Mapping[str, Any]) -> Tensor:
    """Stack the norms of several gradients, which stay pending."""
    order = next(norm._order for norm in norms if isinstance(norm, _PendingNorms))
    values = torch.stack([unmarked(norm) for norm in norms], **kwargs)
    if values.dim() != 1:
        return values
    scopes = [norm._scopes[0] if isinstance(norm, _PendingNorms) else None for norm in norms]
    return _pending(values, order, tuple(scopes))


def _finished(value: Any) -> Any:
    """The same arguments, with pending norms replaced by combined ones."""
    if isinstance(value, _PendingNorms):
        plain = unmarked(value)
        values = list(torch.atleast_1d(plain).unbind())
        return torch.stack(_complete(values, value._order, value._scopes)).view(plain.shape)
    if isinstance(value, list | tuple):
        return type(value)(_finished(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _finished(item) for key, item in value.items()}
    return value


def _complete(
    norms: Sequence[Tensor], order: float, scopes: Sequence[GradientScope | None]
) -> list[Tensor]:
    """The norms of full gradients; those of shards take one collective for each scope."""
    complete = list(norms)
    for scope in dict.fromkeys(scopes):
        if scope is not None and scope.group is not None:
            indices = [i for i, other in enumerate(scopes) if other == scope]
            totals = _over_ranks([norms[i] for i in indices], order, scope)
            for i, total in zip(indices, totals, strict=True):
                complete[i] = total
    return complete


# By function of torch: the names of its arguments after the tensor.
_NORMS: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.linalg.vector_norm: ("ord", "dim", "keepdim"),
    torch.linalg.norm: ("ord", "dim", "keepdim"),
    torch.norm: ("p", "dim", "keepdim", "out", "dtype"),
    torch.functional.norm: ("p", "dim", "keepdim", "out", "dtype"),
    Tensor.norm: ("p", "dim", "keepdim", "dtype"),
    torch._foreach_norm: ("ord", "dtype"),
}
_MOVES = frozenset(_functions("to float double cpu detach", Tensor))
_KEEPING = (
    *_functions("detach to float double half bfloat16 cpu contiguous", Tensor),
    *_functions("view reshape flatten ravel view_as reshape_as", Tensor),
    *_functions("mul multiply div divide true_divide add sub subtract neg negative"),
    *_functions("abs absolute square pow clamp nan_to_num sign where lerp"),
    *_functions("__mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ __rsub__ __neg__", Tensor),
    *_functions("__pow__ __abs__", Tensor),
    Tensor.data.__get__,  # type: ignore[attr-defined]
)
_RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(_functions("cat concat concatenate stack hstack", torch), _joined),
    **dict.fromkeys(_KEEPING, _marked_again),
    **dict.fromkeys(_functions("clone"), _cloned),
    **dict.fromkeys(_NORMS, _norm),
    torch._foreach_norm: _foreach_norm,
}
