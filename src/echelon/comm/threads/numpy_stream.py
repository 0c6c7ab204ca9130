"""NumPy's global generator, of which each simulated rank has one of its own.

To exchange generators takes 0.4 µs at a turn; to read and to write the state of one takes 90 µs.
Of the two normal numbers that NumPy makes at a time, it keeps the second beside the generator, and
forgets it when the generator is exchanged. So it is read, and written, where one is kept.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from types import SimpleNamespace
from typing import Any, final

_START = object.__basicsize__  # of what an object has beyond its type and its references
_WORDS = struct.Struct("624Ii")  # how an MT19937 keeps its state: the key, and a position


# A generator, and the normal number that is kept beside it, if one is.
_Saved = tuple[Any, float | None]


@final
class NumpyStream:
    """Saves, restores and copies what ``numpy.random`` draws from; nothing before its import.

    Example:
        >>> import numpy.random
        >>> stream = NumpyStream()
        >>> state = stream.copy(stream.save())
        >>> number = numpy.random.random()
        >>> stream.restore(state)
        >>> numpy.random.random() == number
        True
    """

    def __init__(self) -> None:
        self._keeps: Any = None  # its ``value`` is 0 if no number is kept
        self._seeds: Any = None
        self._copied: tuple[bytes, Any] = b"", None  # words and state of the last one

    def save(self) -> _Saved | None:
        """The state now."""
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is None:
            return None
        if self._keeps is None:
            self._keeps = _number_kept(numpy_random)
        kept = None
        if self._keeps.value:
            state = numpy_random.get_state(legacy=False)
            kept = state["gauss"] if state["has_gauss"] else None
        return numpy_random.get_bit_generator(), kept

    def restore(self, saved: _Saved | None) -> None:
        """Draw from a state."""
        if saved is None:
            return
        numpy_random, (generator, kept) = sys.modules["numpy.random"], saved
        numpy_random.set_bit_generator(generator)
        if kept is not None:
            state = numpy_random.get_state(legacy=False)
            numpy_random.set_state({**state, "has_gauss": 1, "gauss": kept})

    def copy(self, saved: _Saved | None) -> _Saved | None:
        """The same stream for another rank."""
        return None if saved is None else (self._copy(saved[0]), saved[1])

    def _copy(self, generator: Any) -> Any:
        kind = type(generator)
        if kind is not sys.modules["numpy.random"].MT19937:
            copied = kind()
            copied.state = generator.state
            return copied
        words = ctypes.string_at(generator.ctypes.state_address, _WORDS.size)
        if words != self._copied[0]:
            state = generator.state
            key = state["state"]["key"].tolist()  # which takes 2 µs to write, and an array 47
            state["state"]["key"] = key
            # Where the words are no state, nothing says whether it has changed.
            is_state = _WORDS.unpack(words) == (*key, state["state"]["pos"])
            self._copied = words if is_state else b"", state
        copied = kind(self._no_seeds())
        copied.state = self._copied[1]
        return copied

    def _no_seeds(self) -> Any:
        """The seeds of a generator whose state is written; to draw some takes 110 µs."""
        if self._seeds is None:
            base = sys.modules["numpy.random"].bit_generator.ISeedSequence

            def zeros(self: object, n_words: int, dtype: object = None) -> list[int]:
                return [0] * n_words

            self._seeds = type("NoSeeds", (base,), {"generate_state": zeros})()
        return self._seeds


def _number_kept(numpy_random: Any) -> Any:
    """What of NumPy's memory is not 0 while a normal number is kept; there is no call that says it.

    If it cannot be found, something that is never 0.
    """
    probe = numpy_random.RandomState(0)
    flags = _ints_of(probe)
    looks = [list(flags)]
    for _ in range(2):  # the first draw keeps a number, and the second takes it
        probe.standard_normal()
        looks.append(list(flags))
    places = [place for place, values in enumerate(zip(*looks, strict=True)) if values == (0, 1, 0)]
    if len(places) != 1:
        return SimpleNamespace(value=1)
    start = ctypes.addressof(_ints_of(numpy_random.mtrand._rand))
    return ctypes.c_int.from_address(start + places[0] * ctypes.sizeof(ctypes.c_int))


def _ints_of(random_state: Any) -> Any:
    """The memory of a RandomState."""
    number = (type(random_state).__basicsize__ - _START) // ctypes.sizeof(ctypes.c_int)
    return (ctypes.c_int * number).from_address(id(random_state) + _START)
