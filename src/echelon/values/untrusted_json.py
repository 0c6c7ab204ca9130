"""JSON of unknown origin, checked before anything is made from it.

A few megabytes of JSON can take gigabytes of memory (``[[],[],...``), crash the interpreter
(100,000 brackets) or keep it busy for minutes (a number of a million digits). So the bytes are
first scanned in chunks for the depth of nesting, the length of numbers, and the memory that the
values may take. Only text within these limits is passed to Python's reader.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Never, final

import numpy as np
import numpy.typing as npt

from echelon.errors import ArgumentError, CheckpointCorrupt

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_JSON_DEPTH = 256  # nested brackets, because the parser of Python is recursive
_MAX_NUMBER = 40  # characters without a point or an exponent
_MAX_SPACES = 2**20  # outside of strings, because reading them takes time, too
_CHUNK_NBYTES = 2**16  # scanned at once, so that they stay in the cache
_QUOTE = ord('"')
_BACKSLASHES = re.compile(rb"\\*")

# The marks that are counted, and the greatest memory in bytes that a value takes for each: a list
# with its first value; a dict, as pairs and as a table; a value and its place in a list; a member
# without its two strings; half of a string without its characters; a float, with the call that
# checks it.
_COSTS = {"[": 144, "{": 320, ",": 42, ":": 90, '"': 16, ".": 64, "e": 64, "E": 64}
_DEPTHS = {"[": 1, "{": 1, "]": -1, "}": -1}
_SPACES = " \t\r\n"


def _table(of: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """An array of a number for each byte."""
    table = np.zeros(256, np.int64)
    table[[ord(mark) for mark in of]] = list(of.values())
    return table


_COST, _DEEPER = _table(_COSTS), _table(_DEPTHS)
_IS_MARK = _table(dict.fromkeys([*_COSTS, *_DEPTHS, *_SPACES], 1)).astype(np.bool_)
_IS_SPACE = _table(dict.fromkeys(_SPACES, 1)).astype(np.bool_)
_RECORD = _table({"[": 1, ",": 5, '"': 2})  # the marks of an array of five values with one string


def read_json(data: bytes | memoryview, path: object, *, memory: int, max_records: int = 0) -> Json:
    """Read JSON if that is harmless; else raise ``CheckpointCorrupt`` about the file ``path``.

    It is stricter than Python's own reader: the text is UTF-8, no object has a key twice, numbers
    are finite and have at most 40 characters, values nest at most ``MAX_JSON_DEPTH`` deep, and
    there are at most a million spaces between them. Reading takes at most ``memory`` bytes besides
    ``data``, and about 400 bytes for each of ``max_records`` arrays of five values with one string.

    Example:
        >>> read_json(b'{"a": [1, 2.5]}', "example", memory=2**20)
        {'a': [1, 2.5]}
    """
    problem = _problem(data, memory, max_records)
    if problem is not None:
        raise CheckpointCorrupt(problem, path)
    try:
        value: Json = _DECODER.decode(str(data, "utf-8"))
    except UnicodeDecodeError as error:
        problem = f"no UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        problem = f"no JSON: {error.msg} at character {error.pos}"
    except (_Refused, RecursionError) as error:
        problem = f"JSON that is not read: {error}"
    else:
        return value
    # It is raised outside of the handler, so that it does not keep the text alive.
    raise CheckpointCorrupt(problem, path)


def write_json(value: Mapping[str, object], what: str) -> bytes:
    """The shortest JSON of ``value``, in ASCII; errors call the value ``what``."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error)
    else:
        return text.encode("ascii")
    raise ArgumentError(f"{what} cannot be written as JSON: {problem:.200}")


def brief(value: object) -> str:
    """A short description of a value of any size, for errors."""
    if isinstance(value, dict):
        return f"an object of {len(value)} members"
    if isinstance(value, list | tuple):
        return f"an array of {len(value)} values"
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:77] + "...")
    return repr(value)


def _problem(data: bytes | memoryview, memory: int, max_records: int) -> str | None:
    """The reason why the text must not be passed to Python's reader, if there is one."""
    scan = _Scan()
    for chunk in _chunks(data):
        scan.at(chunk)
        if scan.deepest > MAX_JSON_DEPTH:
            return f"JSON that nests more than {MAX_JSON_DEPTH} deep"
        if scan.longest > _MAX_NUMBER:
            return f"JSON with a number of more than {_MAX_NUMBER} characters, or no JSON"
        if scan.num_spaces > _MAX_SPACES:
            return f"JSON with more than {_MAX_SPACES} spaces between its values"
        if scan.text(len(data)) + scan.values(max_records) > memory:
            return f"JSON that would take more than {memory / 2**20:.0f} MiB of memory"
    return None


def _chunks(data: bytes | memoryview) -> Iterator[bytes]:
    """The text in chunks that end outside of escapes."""
    begin = 0
    while begin < len(data):
        end = begin + _CHUNK_NBYTES
        if data[end - 1 : end] == b"\\":
            end = _BACKSLASHES.match(data, end).end() + 1  # type: ignore[union-attr]
        yield bytes(data[begin:end])
        begin = end


@final
class _Scan:
    """Statistics of the bytes of a JSON text, which are scanned in chunks.

    Attributes:
        deepest: the greatest number of nested brackets.
        longest: the greatest number of bytes of a number or another word outside of strings.
        strings: the number of bytes in strings.
    """

    def __init__(self) -> None:
        self.deepest = self.longest = self.strings = 0
        self._counts = np.zeros(256, np.int64)  # of each mark, outside of strings
        self._is_ascii, self._has_escapes = True, False
        self._depth = self._inside = 0
        self._word = 0  # the bytes since the last mark, if it was outside of strings

    def at(self, chunk: bytes) -> None:
        """Scan the next chunk."""
        self._is_ascii = self._is_ascii and chunk.isascii()
        self._has_escapes = self._has_escapes or b"\\u" in chunk
        # A backslash begins an escape, because JSON has none outside of strings. When escapes are
        # removed, each quote begins or ends a string.
        text = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        if self._inside and b'"' not in text:
            self.strings += len(chunk)
            return
        array = np.frombuffer(text, np.uint8)
        places = np.flatnonzero(_IS_MARK[array])
        marks = array[places]
        quotes = marks == _QUOTE
        # Whether the bytes before the first mark, and those after each mark, are in a string.
        inside = (np.cumsum(np.append(self._inside, quotes), dtype=np.uint8) & 1).astype(np.bool_)
        gaps = np.diff(places, prepend=-1, append=len(text)) - 1
        self._measure(gaps, inside, len(chunk) - len(text))
        outside = marks[~(inside[1:] & inside[:-1])]
        self._counts += np.bincount(outside, minlength=256)
        depths = self._depth + np.cumsum(_DEEPER[outside])
        self._depth = int(depths[-1]) if depths.size else self._depth
        self.deepest = max(self.deepest, int(depths.max(initial=0)))

    def _measure(
        self, gaps: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_], escaped: int
    ) -> None:
        """Add the lengths of strings and words between marks."""
        # Marks in a string are part of it.
        self.strings += int(gaps[inside].sum()) + int(inside.sum()) + escaped
        words = np.where(inside, 0, gaps)
        words[0] += self._word
        self.longest = max(self.longest, int(words.max()))
        self._word, self._inside = int(words[-1]), int(inside[-1])

    @property
    def num_spaces(self) -> int:
        """The number of spaces and line ends outside of strings."""
        return int(self._counts[_IS_SPACE].sum())

    def values(self, max_records: int) -> int:
        """The greatest memory of the values, without characters of strings and records."""
        has = _RECORD > 0
        num_records = min(max_records, int((self._counts[has] // _RECORD[has]).min()))
        return int((self._counts - num_records * _RECORD) @ _COST)

    def text(self, nbytes: int) -> int:
        """The greatest memory of a text of so many bytes and of its strings, as characters.

        Python stores a string with 1, 2 or 4 bytes for each character, depending on the widest one.
        While a string with escapes is assembled, its parts take memory, too.
        """
        if not self._is_ascii:
            return 8 * (nbytes + self.strings)
        return nbytes + (5 if self._has_escapes else 1) * self.strings


@final
class _Refused(Exception):
    """JSON that Python would read, but this module refuses."""


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _Refused(f"the key {twice!r:.80} is there twice")
    return members


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {text:.80} is no float")
    return value


def _constant(text: str) -> Never:
    raise _Refused(f"{text} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
