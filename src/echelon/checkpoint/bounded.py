"""JSON of unknown origin, judged before anything is made from it.

A few megabytes of JSON can ask for gigabytes of memory (``[[],[],...``), end the interpreter
(100,000 brackets) or keep it busy for minutes (a number of a million digits). So the text is first
looked at as bytes, in parts: how deep it nests, and how much memory its values will take at most.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Never, final

import numpy as np
import numpy.typing as npt

from echelon.errors import ArgumentError, CheckpointCorrupt

__all__ = ["MAX_DEPTH", "Json", "brief", "read_json", "write_json"]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_DEPTH = 256  # brackets inside of brackets; the parser of Python calls itself for each
_MAX_DIGITS = 20  # of a whole number, with its sign: all of 64 bits
_MAX_FLOAT = 40  # characters; Python writes at most 24
_PART = 2**16  # bytes looked at together, which stay in the cache
_QUOTE = ord('"')
_BACKSLASHES = re.compile(rb"\\*")

# What a value takes in memory at most, in bytes, by the character that shows that there is one.
# [ and {: the empty container, what its first entry adds, and one more value. Comma: a value and
# its place. Colon: a key and its place.
_COST = np.zeros(256, np.int64)
_COST[[ord(mark) for mark in "[{,:"]] = 160, 320, 80, 130
_DEEPER = np.zeros(256, np.int8)
_DEEPER[[ord(mark) for mark in "[{]}"]] = 1, 1, -1, -1
_IS_MARK = np.zeros(256, np.bool_)
_IS_MARK[[ord(mark) for mark in '[]{},:"']] = True


def read_json(data: bytes, path: object, *, memory: int) -> Json:
    """The value that ``data`` is the JSON of, where reading it is harmless.

    Stricter than Python's own reader: UTF-8 only, no key twice in one object, no NaN and no
    infinity, whole numbers of at most 20 digits, nesting of at most ``MAX_DEPTH``.

    Args:
        data: the whole text.
        path: of the file, for the error.
        memory: what reading may take at most besides ``data``, in bytes.

    Raises:
        CheckpointCorrupt: it is no such JSON.

    Example:
        >>> read_json(b'{"a": [1, 2.5]}', "example", memory=2**20)
        {'a': [1, 2.5]}
    """
    _check_bounds(data, path, memory)
    try:
        found: Json = _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        problem = f"no UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        problem = f"no JSON: {error.msg} at character {error.pos}"
    except (_Refused, RecursionError) as error:
        problem = f"JSON that is not read: {error}"
    else:
        return found
    # Outside of the handler, so that the error does not keep the text alive.
    raise CheckpointCorrupt(problem, path)


def write_json(value: Mapping[str, object], what: str) -> bytes:
    """The shortest JSON of ``value``, in ASCII.

    Raises:
        ArgumentError: ``value``, called ``what``, has no JSON.
    """
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error)
    else:
        return text.encode("ascii")
    raise ArgumentError(f"{what} cannot be written as JSON: {problem:.200}")


def brief(found: object) -> str:
    """What was found where something else was expected, in a few words, whatever its size."""
    if isinstance(found, dict):
        return f"an object of {len(found)} members"
    if isinstance(found, list | tuple):
        return f"an array of {len(found)} values"
    if isinstance(found, str):
        return repr(found if len(found) <= 80 else found[:77] + "...")
    return repr(found)


def _check_bounds(data: bytes, path: object, memory: int) -> None:
    """Refuse what nests too deeply, or would take more than ``memory`` bytes."""
    # Python keeps a string in 1, 2 or 4 bytes per character, after its widest; and text and values
    # are in memory together.
    narrow = data.isascii() and b"\\u" not in data
    taken = len(data) * (2 if narrow else 8)
    depth = in_string = begin = 0
    while begin < len(data):
        end = begin + _PART
        if data[end - 1 : end] == b"\\":  # an escape is not cut in two
            end = _BACKSLASHES.match(data, end).end() + 1  # type: ignore[union-attr]
        # A backslash is an escape, because outside of strings it is no JSON. Without escapes each
        # quote begins or ends a string.
        text = data[begin:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        begin = end
        part = np.frombuffer(text, np.uint8)
        marks: npt.NDArray[np.uint8] = part[_IS_MARK[part]]
        quotes = marks == _QUOTE
        parity = (np.cumsum(quotes, dtype=np.uint8) + in_string) & 1
        outside = marks[(parity == 0) & ~quotes]
        in_string = int(parity[-1]) if parity.size else in_string
        depths = np.cumsum(_DEEPER[outside], dtype=np.int64) + depth
        depth = int(depths[-1]) if depths.size else depth
        taken += int(_COST[outside].sum())
        if depths.max(initial=0) > MAX_DEPTH:
            raise CheckpointCorrupt(f"JSON that nests more than {MAX_DEPTH} deep", path)
        if taken > memory:
            raise CheckpointCorrupt(
                f"JSON that would take more than {memory / 2**20:.0f} MiB of memory", path
            )


@final
class _Refused(Exception):
    """JSON that Python would read and this module does not."""


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _Refused(f"the key {twice!r:.80} is there twice")
    return found


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise _Refused(f"the whole number {text:.20}... has more than {_MAX_DIGITS} digits")
    return int(text)


def _float(text: str) -> float:
    if len(text) > _MAX_FLOAT or not math.isfinite(value := float(text)):
        raise _Refused(f"the number {text:.40}... is no float")
    return value


def _constant(text: str) -> Never:
    raise _Refused(f"{text} is no number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_whole, parse_float=_float, parse_constant=_constant
)
