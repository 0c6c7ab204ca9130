"""The state of Python's ``random``, read only when it has changed.

``random.getstate`` makes 625 integers, which takes 10 µs and more at each turn of a simulated rank.
Most ranks draw no numbers from it. CPython keeps the state in one piece of memory, and to compare
that piece takes 0.1 µs.
"""

from __future__ import annotations

import _random
import ctypes
import random
import struct
from typing import Any, final

_START = object.__basicsize__  # of what a generator has beyond its type and its references
_NBYTES = _random.Random.__basicsize__ - _START


@final
class PythonStream:
    """Saves and restores the state of ``random``; equal states are the same object.

    Example:
        >>> stream = PythonStream()
        >>> state = stream.save()
        >>> stream.save() is state
        True
        >>> number = random.random()
        >>> stream.restore(state)
        >>> random.random() == number
        True
    """

    def __init__(self) -> None:
        self._generator: Any = vars(random)["_inst"]
        is_in_memory = _words_of(self._generator) == _state_of(self._generator)
        self._memory = _memory_of(self._generator) if is_in_memory else None
        self._seen: bytes | None = None
        self._gauss: float | None = None
        self._state: Any = None

    def save(self) -> Any:
        """The state now."""
        if self._memory is None or (
            self._memory.tobytes() != self._seen or self._generator.gauss_next != self._gauss
        ):
            self._state = random.getstate()
            self._see()
        return self._state

    def restore(self, state: Any) -> None:
        """Go back to a state."""
        random.setstate(state)
        self._state = state
        self._see()

    def _see(self) -> None:
        """Remember what differs as soon as the state does."""
        if self._memory is not None:
            self._seen, self._gauss = self._memory.tobytes(), self._generator.gauss_next


def _memory_of(generator: object) -> memoryview:
    """The memory itself, and no copy."""
    return memoryview((ctypes.c_char * _NBYTES).from_address(id(generator) + _START)).cast("B")


def _words_of(generator: object) -> tuple[int, ...]:
    """The state as CPython keeps it: a position, and 624 words."""
    numbers = struct.Struct("i624I")
    return numbers.unpack_from(_memory_of(generator)) if numbers.size <= _NBYTES else ()


def _state_of(generator: Any) -> tuple[int, ...]:
    *words, position = generator.getstate()[1]
    return position, *words
