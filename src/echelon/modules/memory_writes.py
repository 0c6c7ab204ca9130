"""What operators of torch write into, as their schemas say; and ``set_``, which writes nothing.

Batch norm does not say that it updates its statistics, and is known by the names of its arguments.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

# These write no values, and what they change belongs to the object.
_NO_WRITES = frozenset(
    {"aten::detach_", "aten::record_stream", "aten::requires_grad_", "aten::set_"}
)
_STATISTICS = frozenset({"running_mean", "running_var"})


def written_by(operator: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes into."""
    schema = operator._schema
    if schema.name in _NO_WRITES:
        return
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    given |= named
    if schema.is_mutable:
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_in(given.get(argument.name))
    if given.get("training") or given.get("train"):
        yield from tensors_in([given.get(name) for name in _STATISTICS])


def memory_of(tensor: Tensor) -> int:
    """Which memory a tensor has; 0 if it has none."""
    with DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided:
            return 0
        return int(tensor.untyped_storage()._cdata)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in the arguments of a function of torch."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value)


class WriteWatch(TorchDispatchMode, ABC):
    """Sees each tensor that an operator is about to write into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports the compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if isinstance(func, OpOverload):
            for tensor in written_by(func, args, named):
                self.check(tensor)
        return func(*args, **named)

    @abstractmethod
    def check(self, tensor: Tensor) -> None:
        """Refuse a write into this tensor by an error, or let it be."""


@final
class KeepsMemory:
    """``set_`` of a parameter: nothing is done if it sets the memory that the parameter has.

    A parametrization that is registered sets the memory of the parameter to itself. Torch would
    count up the version of the parameter, as if something was written.
    """

    __slots__ = ("_param",)

    def __init__(self, param: nn.Parameter) -> None:
        self._param = weakref.ref(param)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        param = self._param()
        assert param is not None, "it is called as a method of the parameter"
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            source = args[0]
            if _place(source) == _place(param):
                return param
        with DisableTorchFunctionSubclass():
            return Tensor.set_(param, *args, **kwargs)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    with DisableTorchFunctionSubclass():
        memory = memory_of(tensor), tensor.storage_offset(), tensor.dtype
        return *memory, tensor.shape, tensor.stride()
