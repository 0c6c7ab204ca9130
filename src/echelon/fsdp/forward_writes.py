"""Writes of a forward into its parameters, which other ranks read or which are lost after it.

Three things find them. The versions of the parameters, after each forward: a write into a parameter
or a view of it counts up its version. That of an alias does not (``weight.data``), so in some
forwards a mode sees all operators, and refuses one before it writes. What writes without an
operator of torch, such as NumPy or a compiled kernel, is found by a sum of the bits of the
parameters before and after these forwards.

[Note: which forwards are watched]
The forwards 1, 2, 8, 32 and every 256th, of training and of evaluation, so that it costs next to
nothing. A forward that writes once mostly writes each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from echelon.fsdp.storage import Storage
from echelon.fsdp.unit import Unit
from echelon.modules.memory_overlap import span_of
from echelon.modules.memory_writes import WriteWatch, memory_of
from echelon.modules.replica_check import is_turn

_EVERY = 256


@final
class ForwardWatch:
    """Decides which forwards of a model are watched, and watches them.

    Attributes:
        is_on: whether the forward that is under way is watched.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [unit for unit in units if unit.losing_writes]
        self._num_forwards = {True: 0, False: 0}  # by whether the model trains
        self.is_on = False

    def begin_forward(self, *, training: bool) -> None:
        """Decide whether the forward that begins is watched."""
        n = self._num_forwards[training] = self._num_forwards[training] + 1
        is_traced = torch.jit.is_tracing() or torch.compiler.is_compiling()  # type: ignore[attr-defined, no-untyped-call]
        is_due = n == 1 or is_turn(n, _EVERY)
        self.is_on = bool(self._units) and is_due and not is_traced

    def refuse_writes(self) -> AbstractContextManager[Any]:
        """Refuse writes in the body, if the forward is watched."""
        return _OperatorWatch(self._units) if self.is_on else nullcontext()


@final
class _OperatorWatch(WriteWatch):
    """Refuses operators that write into unsharded parameters."""

    supports_higher_order_operators = True

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__()
        self._by_memory: dict[int, list[tuple[Unit, Storage]]] = {}
        for unit in units:
            for storage in unit.losing_writes:
                memory = memory_of(storage.unsharded[0])
                self._by_memory.setdefault(memory, []).append((unit, storage))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled units run without the compiler

    def check(self, tensor: Tensor) -> None:
        for unit, storage in self._by_memory.get(memory_of(tensor), ()):
            if not storage.is_filling and (name := _written(storage, tensor)) is not None:
                raise unit.refusal(name)


def _written(storage: Storage, tensor: Tensor) -> str | None:
    """The name of a parameter whose unsharded memory a tensor overlaps."""
    first, last = span_of(tensor)
    for member, param in zip(storage.members, storage.unsharded, strict=True):
        start, end = span_of(param)
        if first < end and start < last:
            return member.name
    return None
