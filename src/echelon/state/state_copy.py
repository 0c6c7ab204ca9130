"""Tensors of a state dict that are copies, so that a write into one would be lost, and is refused.

``StateCopy`` is the Python class of a copy and of all that shares its memory. Its memory is that of
a plain tensor: whatever only reads it is right, and what is computed from it is plain.

[Note: what is a write] Each function of torch runs in a mode that sees its operators, which say
in their schema what they write into. So in-place functions, ``out=``, index assignments and
``foreach`` are all found before the write, by the memory written into.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn.modules.module import register_module_buffer_registration_hook

from echelon.errors import StateError
from echelon.modules.memory_writes import WriteWatch, memory_of, tensors_in
from echelon.modules.sharded_tensor import name_of, unmarked
from echelon.values.encoding import TENSOR_CLASSES

# These write without an operator.
_UNSEEN_WRITES = frozenset({Tensor.apply_, Tensor.map_, Tensor.map2_})
_WRITTEN_ATTRIBUTES = frozenset({"data", "real", "imag"})


class StateCopy(Tensor):
    """A copy of a tensor of a model, which refuses to be written into."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if torch.compiler.is_compiling():  # what is compiled sees plain tensors
            with DisableTorchFunctionSubclass():
                return func(*args, **named)
        if func in _UNSEEN_WRITES and isinstance(args[0], StateCopy):
            _refuse(f"{name_of(func)}()")
        memory = {memory_of(value) for value in _copies_in((args, named))}
        with _RefuseWrites(func, memory):
            if all(kind in _PLAIN for kind in types):
                with DisableTorchFunctionSubclass():
                    result = func(*args, **named)
            else:  # another class has a say in what the function does
                result = func(*_as_plain(args), **_as_plain(named))
        # What a module loads is its own.
        return result if func is Tensor.module_load else _marked_again(result, memory)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WRITTEN_ATTRIBUTES:
            _refuse(f"an assignment to .{name}")
        super().__setattr__(name, value)

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse; torch asks no class about this function."""
        _refuse("set_()")

    def __format__(self, spec: str) -> str:
        return format(unmarked(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unmarked(self).__reduce_ex__(protocol)

    def __copy__(self) -> Tensor:
        same: Tensor = as_copy(copy.copy(unmarked(self)))
        return same

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(unmarked(self), memo)
        copied: Tensor = memo[id(self)]
        return copied

    # ``nn.Parameter(copy)`` and ``nn.Buffer(copy)`` set these of an alias that they have made. A
    # module that owns the memory may write into it.

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    @property
    def _is_buffer(self) -> bool:
        return False

    @_is_buffer.setter
    def _is_buffer(self, value: bool) -> None:
        self.__class__ = Tensor  # type: ignore[assignment]
        self._is_buffer = value


TENSOR_CLASSES.add(StateCopy)
_PLAIN = frozenset({Tensor, nn.Parameter, StateCopy})


@final
class _RefuseWrites(WriteWatch):
    """Refuse the operators of ``func`` that write into ``memory``."""

    def __init__(self, func: Callable[..., Any], memory: set[int]) -> None:
        super().__init__()
        self._func, self._memory = func, memory

    def check(self, tensor: Tensor) -> None:
        if memory_of(tensor) in self._memory:
            _refuse(f"{name_of(self._func)}()")


def as_copy(value: Any) -> Any:
    """The same memory as a ``StateCopy``. What is no plain tensor in memory is returned unchanged.

    Example:
        >>> copy = as_copy(torch.ones(2))
        >>> type(copy + 1) is Tensor
        True
    """
    if type(value) is not Tensor or value.layout is not torch.strided:
        return value
    _watch_buffers()
    return value.as_subclass(StateCopy)


@cache
def _watch_buffers() -> None:
    """Let modules take copies as buffers of their own, as ``load_state_dict(assign=True)`` does."""
    register_module_buffer_registration_hook(_own_buffer)  # type: ignore[arg-type]


def _own_buffer(module: nn.Module, name: str, value: Tensor | None) -> Tensor | None:
    return unmarked(value) if isinstance(value, StateCopy) else None


def _refuse(what: str) -> NoReturn:
    raise StateError(
        f"{what} writes into a tensor of a state dict that has copies, so the model "
        "would not change: change the model with model.load_state_dict(state), or its parameters "
        "inside `with model.full_parameters(writeback=True):`; tensor.clone() is yours to write "
        "into"
    )


# Memory --------------------------------------------------------------------------------------


def _copies_in(values: Any) -> Iterator[Tensor]:
    return (value for value in tensors_in(values) if isinstance(value, StateCopy))


def _as_plain(values: Any) -> Any:
    """Arguments with copies as plain tensors."""
    if isinstance(values, StateCopy):
        return unmarked(values)
    if type(values) in (list, tuple):
        return type(values)(map(_as_plain, values))
    if type(values) is dict:
        return {key: _as_plain(value) for key, value in values.items()}
    return values


def _marked_again(result: Any, memory: set[int]) -> Any:
    """A result in which what shares memory with a copy is one too."""
    if type(result) is Tensor:
        return as_copy(result) if memory_of(result) in memory else result
    if type(result) in (list, tuple):
        return type(result)(_marked_again(value, memory) for value in result)
    if isinstance(result, Iterator):  # of the rows of a copy
        return (_marked_again(value, memory) for value in result)
    return result
