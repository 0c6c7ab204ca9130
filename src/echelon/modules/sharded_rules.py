"""The table of what functions of torch do with tensors of which each rank holds a part.

Facts about a tensor are those of the whole one. What belongs to the object, such as its gradient
and its hooks, is passed on. The other rules are in the files that this one puts together. A
function in none of them needs values that this rank does not have, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._guards import TracingContext
from torch.autograd.graph import get_gradient_edge

from echelon.errors import ArgumentError, StateError
from echelon.modules.kept_gradients import KEPT
from echelon.modules.sharded_arithmetic import ARITHMETIC, functions
from echelon.modules.sharded_joins import JOINS
from echelon.modules.sharded_norms import NORMS
from echelon.modules.sharded_reductions import REDUCTIONS
from echelon.modules.sharded_tensor import (
    KEPT_RULES,
    RULES,
    Rule,
    call_plain,
    is_part,
    local_shard,
    parts_in,
    refuse,
    sharding_of,
)
from echelon.modules.sharded_views import VIEWS, on_meta


def _shape(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return torch.Size(sharding_of(args[0]).shape)


def _numel(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return sharding_of(args[0]).numel


def _dim(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return len(sharding_of(args[0]).shape)


def _fact(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A fact about the whole tensor, asked of one without memory."""
    with DisableTorchFunction():
        return func(*map(on_meta, args), **kwargs)


def _text(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    sharding, local = sharding_of(args[0]), local_shard(args[0])
    return f"{type(args[0]).__name__}({sharding.describe()}: {local!r})"


def _formatted(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    sharding = sharding_of(args[0])
    if sharding.numel == 1 and not sharding.shape:
        return format(sharding.gather(local_shard(args[0])).item(), *args[1:])
    return repr(args[0])


def _backward(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """``backward(inputs=...)``, of which parameters may be parts: their leaves are in the graph.

    Functions of users run in it, so nothing is disabled while it runs.
    """
    if any(map(is_part, args[0])):
        refuse(func, args, kwargs)
    inputs = kwargs["inputs"]
    for value in filter(is_part, inputs):
        if not value.requires_grad:
            raise ArgumentError(
                f"backward(inputs=...) has {sharding_of(value).describe()}, which requires no "
                "gradient: leave it out of inputs"
            )
        if sharding_of(value).is_flat:
            raise StateError(
                f"backward(inputs=...) has {sharding_of(value).describe()}, through which no "
                "gradient flows: call backward() without inputs, or wrap with use_orig_params=True"
            )
    with DisableTorchFunctionSubclass():
        edges = [get_gradient_edge(value) if is_part(value) else value for value in inputs]
    func(*args, **{**kwargs, "inputs": edges})


def _is_view(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the part is a view. A compiler that asks gets a graph break in place of an answer.

    It would trace the part as if that were the whole tensor. So the code runs as it is.
    """
    if TracingContext.try_get() is not None:
        from torch._dynamo.exc import Unsupported  # which imports the compiler

        raise Unsupported(
            f"torch.compile traced code that uses {sharding_of(args[0]).describe()}. It is "
            "compiled where it is whole: compile the modules that are units, and the step of the "
            "optimizer, without fullgraph=True for what is around them"
        )
    return bool(call_plain(func, args, kwargs))


def _gradients(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``torch.autograd.grad``, which would give each rank gradients of its own rows."""
    part = parts_in((args, kwargs))[0]
    raise StateError(
        f"torch.autograd.grad of {sharding_of(part).describe()}: call loss.backward() and read "
        "parameter.grad, which all ranks reduce. In ec.DDP torch.autograd.grad gives the gradient "
        "of this rank's rows"
    )


_NOT_PASSED = [
    "H",
    "T",
    "mH",
    "mT",
    "real",
    "imag",
    "data",
    "shape",
    "ndim",
    "nbytes",
    "_cdata",
    "__weakref__",
    "__dict__",
]
_ATTRIBUTES = [
    descriptor
    for name in dir(torch._C.TensorBase)
    if name not in _NOT_PASSED
    and hasattr(descriptor := getattr(torch._C.TensorBase, name), "__set__")
]
_PASSED = (
    "register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ detach_ "
    "is_floating_point is_complex is_signed is_inference is_conj is_neg is_shared is_pinned "
    "get_device element_size __hash__ __dir__ new_zeros new_ones new_empty new_full new_tensor "
    "result_type can_cast is_same_size __array_priority__ is_distributed has_names"
)
_FACTS: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys((descriptor.__get__ for descriptor in _ATTRIBUTES), call_plain),
    **dict.fromkeys((descriptor.__set__ for descriptor in _ATTRIBUTES), call_plain),
    **dict.fromkeys((descriptor.__delete__ for descriptor in _ATTRIBUTES), call_plain),
    **dict.fromkeys(functions(_PASSED), call_plain),
    **dict.fromkeys(functions("size stride is_contiguous __len__ is_same_size"), _fact),
    **dict.fromkeys(functions("numel nelement"), _numel),
    **dict.fromkeys(functions("dim ndimension"), _dim),
    Tensor._is_view: _is_view,
    Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    Tensor.ndim.__get__: _dim,  # type: ignore[attr-defined]
    Tensor.nbytes.__get__: _fact,  # type: ignore[attr-defined]
}
_TABLE: dict[Callable[..., Any], Rule] = {
    **_FACTS,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _gradients,
    Tensor.__repr__: _text,
    Tensor.__format__: _formatted,
    **ARITHMETIC,
    **VIEWS,
    **REDUCTIONS,
    **NORMS,
    **JOINS,
}


def use_rules() -> None:
    """Let parts follow the rules; until then every use of one is refused."""
    RULES.update(_TABLE)
    KEPT_RULES.update(_FACTS | KEPT)
