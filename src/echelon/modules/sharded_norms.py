"""Norms of tensors of which each rank holds a part, and of the gradients of stages of a pipeline.

``torch.nn.utils.clip_grad_norm_``, and all code like it, takes norms of ``.grad``. With plain
tensors every rank would get the norm of its own part, and silently clip by another number than the
other ranks.

[Note: the cost of a norm]
A norm is combined over the ranks of the group, all of which take it. ``torch.nn.utils`` uses the
norms of single gradients only for the norm of all of them. There the norms of parts stay pending,
and one collective combines all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import UnsupportedError
from echelon.modules.norms import norms_over_ranks
from echelon.modules.sharded_arithmetic import (
    functions,
    is_called_by,
    without_gradient,
)
from echelon.modules.sharded_reductions import along_rows, counted, dims_within
from echelon.modules.sharded_tensor import (
    Rule,
    ShardedTensor,
    Sharding,
    call_plain,
    is_part,
    sharding_of,
    unmarked,
    whole_shape,
)
from echelon.modules.stage_gradients import (
    JoinedStages,
    StageGradient,
    number_of_stage,
    refuse_joined,
)

_CLIP = "torch.nn.utils.clip_grad"  # uses only the norm of all gradients
_LABEL = "norms of gradients, which all ranks take"


class _PendingNorms(Tensor):
    """Norms of gradients inside ``clip_grad_norm_``, which ranks have not combined yet.

    Attributes:
        _order: the order of the norms.
        _shardings: the sharding of each norm; None for that of a plain tensor.
        _is_stacked: whether this is a 1D tensor of norms.
    """

    _order: float
    _shardings: tuple[Sharding | None, ...]
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
            return _pending(call_plain(func, args, kwargs or {}), first._order, first._shardings)
        if func in _NORMS and isinstance(first, _PendingNorms) and first._is_stacked:
            first.check_all_stages()
        if getattr(func, "__name__", "") == "__get__":  # such as ``device``
            return call_plain(func, args, kwargs or {})
        return func(*_finished(args), **_finished(kwargs or {}))  # numbers of stages have rules

    def check_all_stages(self) -> None:
        """Refuse a norm of the gradients of this rank's stages only."""
        if any(sharding is not None and sharding.is_staged for sharding in self._shardings):
            refuse_joined("the norm")


def mark_stage_gradients(params: Iterable[nn.Parameter]) -> None:
    """Mark the gradients of this rank's stages; other ranks have those of other stages.

    This is done in place, so that ``.grad`` stays the same object.
    """
    for param in params:
        gradient = param.grad
        if type(gradient) is Tensor:
            gradient.__class__ = StageGradient
            gradient._source = id(param)  # type: ignore[attr-defined]
        elif isinstance(gradient, ShardedTensor) and not gradient._sharding.is_staged:
            sharding = replace(gradient._sharding, is_staged=True, source=id(param))
            gradient._sharding = sharding


_STAGED = Sharding("gradients of stages", "", (), is_staged=True)


def _sharding_of(tensor: object) -> Sharding | None:
    """Of which tensor this is a part, or that it is of a stage; None for a plain tensor."""
    if isinstance(tensor, StageGradient):
        return replace(_STAGED, source=tensor._source)
    return sharding_of(tensor) if isinstance(tensor, Tensor) and is_part(tensor) else None


# Norms ---------------------------------------------------------------------------------------


def _order_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The order of a norm; an UnsupportedError if it is not that of the tensor as a vector."""
    named = _named(func, args, kwargs)
    order = named.pop("ord", named.pop("p", None))
    shape = () if func is torch._foreach_norm else whole_shape(args[0])
    of_matrix = func is torch.linalg.norm and order is not None and len(shape) != 1
    order = 2.0 if order in (None, "fro") else order
    for ignored in ("dtype", "foreach", "keepdim"):
        named.pop(ignored, None)
    shaped = {
        key: value for key, value in named.items() if value is not None and value is not False
    }
    if shaped or of_matrix or not isinstance(order, int | float) or order <= 0:
        options = ", ".join(f"{key}={value!r}" for key, value in {"ord": order, **shaped}.items())
        raise UnsupportedError(
            f"a norm with {options:.80} of a tensor of which this rank has a shard, which is no "
            "matrix of the model's: take the norm of all of it, or do it inside `with "
            "model.full_parameters():`. An optimizer that needs whole matrices cannot train a "
            "sharded model"
        )
    return float(order)


def _named(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    return {**dict(zip(_NORMS[func], args[1:], strict=False)), **kwargs}


def _norm(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The norm of one tensor, or of each of its rows."""
    tensor, in_clip = args[0], is_called_by(_CLIP)
    sharding = _sharding_of(tensor)
    if sharding is None:
        return call_plain(func, args, kwargs)
    if sharding.pieces and sharding.is_staged:
        refuse_joined("a norm")
    if in_clip and sharding.is_staged:
        refuse_joined("the norm")
    if sharding.group is None:  # a full gradient of a stage
        norm = call_plain(func, args, kwargs)
        return norm if norm.dim() else _pending(norm, 2.0, (sharding,))
    named = _named(func, args, kwargs)
    dims = dims_within(named.pop("dim", None), sharding)
    if dims is not None and sharding.by_rows and 0 not in dims:
        return along_rows(func, args, kwargs, dims, bool(named.get("keepdim")))
    if dims is None:
        order = _order_of(func, (tensor,), {k: v for k, v in named.items() if v is not None})
    else:
        order = _order_of(func, args, kwargs)
    if in_clip:
        return _pending(_norm_of_part(tensor, order, named.get("dtype")), order, (sharding,))

    def compute() -> Tensor:
        part = _norm_of_part(tensor, order, named.get("dtype"))
        norm = _over_ranks([part], order, sharding)[0]
        return norm.view((1,) * len(sharding.shape)) if named.get("keepdim") else norm

    norm = without_gradient(compute, args)
    staged = replace(_STAGED, source=sharding.source)
    return _pending(norm, order, (staged,)) if sharding.is_staged and not norm.dim() else norm


def _foreach_norm(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The norm of each of several tensors; one collective for each group."""
    tensors = list(args[0])
    shardings = [_sharding_of(tensor) for tensor in tensors]
    staged = [sharding for sharding in shardings if sharding is not None and sharding.is_staged]
    if staged and is_called_by(_CLIP):
        refuse_joined("the norm")
    order, dtype = _order_of(func, args, kwargs), kwargs.get("dtype")

    def compute() -> list[Tensor]:
        norms = [
            torch.linalg.vector_norm(tensor, order, dtype=dtype)
            if sharding is None
            else _norm_of_part(tensor, order, dtype)
            for tensor, sharding in zip(tensors, shardings, strict=True)
        ]
        return _complete(norms, order, shardings)

    complete = list(without_gradient(compute, tensors))
    if not staged:
        return complete
    pairs = zip(complete, shardings, strict=True)
    return [
        number_of_stage(norm, sharding.source)
        if sharding is not None and sharding.is_staged
        else norm
        for norm, sharding in pairs
    ]


def _norm_of_part(tensor: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    part = counted(tensor)[1] if is_part(tensor) else unmarked(tensor).detach()
    # torch refuses the largest magnitude of an empty tensor.
    norm: Tensor = torch.linalg.vector_norm(part, order if part.numel() else 2.0, dtype=dtype)
    return norm


def _over_ranks(norms: Sequence[Tensor], order: float, sharding: Sharding) -> list[Tensor]:
    """The norms of full tensors from those of parts. All ranks of the group call it."""
    assert sharding.group is not None
    parts = torch.stack([norm.double().to(sharding.group.device) for norm in norms])
    complete = norms_over_ranks(parts, order, sharding.group, _LABEL)
    return [total.to(norm) for total, norm in zip(complete.unbind(), norms, strict=True)]


# Norms of norms ------------------------------------------------------------------------------


def _pending(values: Tensor, order: float, shardings: tuple[Sharding | None, ...]) -> _PendingNorms:
    plain = unmarked(values)
    norms: _PendingNorms = plain.as_subclass(_PendingNorms)
    norms._order, norms._shardings, norms._is_stacked = order, shardings, plain.dim() == 1
    return norms


def _stacked(norms: Sequence[Tensor], kwargs: Mapping[str, Any]) -> Tensor:
    """Stack the norms of several gradients, which stay pending."""
    order = next(norm._order for norm in norms if isinstance(norm, _PendingNorms))
    values = torch.stack([unmarked(norm) for norm in norms], **kwargs)
    if values.dim() != 1:
        return values
    shardings = [norm._shardings[0] if isinstance(norm, _PendingNorms) else None for norm in norms]
    return _pending(values, order, tuple(shardings))


def _finished(value: Any) -> Any:
    """The same arguments, with pending norms replaced by combined ones."""
    if isinstance(value, _PendingNorms):
        plain = unmarked(value)
        values = list(torch.atleast_1d(plain).unbind())
        whole = torch.stack(_complete(values, value._order, value._shardings)).view(plain.shape)
        staged = [s for s in value._shardings if s is not None and s.is_staged]
        if not staged:
            return whole
        return (
            whole.as_subclass(JoinedStages)
            if whole.dim()
            else number_of_stage(whole, staged[0].source)
        )
    if isinstance(value, list | tuple):
        return type(value)(_finished(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _finished(item) for key, item in value.items()}
    return value


def _complete(
    norms: Sequence[Tensor], order: float, shardings: Sequence[Sharding | None]
) -> list[Tensor]:
    """The norms of full tensors; those of parts take one collective for each group."""
    complete = list(norms)
    by_group: dict[tuple[int, ...], list[int]] = {}
    for i, sharding in enumerate(shardings):
        if sharding is not None and sharding.group is not None:
            by_group.setdefault(tuple(sharding.group.ranks), []).append(i)
    for indices in by_group.values():
        sharding = shardings[indices[0]]
        assert sharding is not None
        totals = _over_ranks([norms[i] for i in indices], order, sharding)
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
_MOVES = frozenset(functions("to float double cpu detach", Tensor))
NORMS: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys(_NORMS, _norm),
    torch._foreach_norm: _foreach_norm,
}
