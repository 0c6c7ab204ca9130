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
from itertools import accumulate
from typing import Never, final

from echelon.errors import ArgumentError, CheckpointCorrupt

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_JSON_DEPTH = 256  # nested brackets, because the parser of Python is recursive
_MAX_NUMBER = 40  # characters without a point or an exponent
_MAX_SPACES = 2**20  # outside of strings, because reading them takes time, too
_CHUNK_NBYTES = 2**16  # scanned at once
_BACKSLASHES = re.compile(rb"\\*")

# The marks that are counted, and the greatest memory in bytes that a value takes for each: a list
# with its first value; a dict, as pairs and as a table; a value and its place in a list; a member
# without its two strings; half of a string without its characters; a float, with the call that
# checks it.
_COSTS = {b"[": 144, b"{": 320, b",": 42, b":": 90, b'"': 16, b".": 64, b"e": 64, b"E": 64}
_RECORD = {b"[": 1, b",": 5, b'"': 2}  # the marks of an array of five values with one string
_SPACES = (b" ", b"\t", b"\r", b"\n")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEEPER = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
# All bytes between marks become an x, so that a long word is found as fast as a text.
_WORDS = bytes(byte if byte in b'[]{},:".eE \t\r\n' else ord("x") for byte in range(256))
_LONG_WORD = b"x" * (_MAX_NUMBER + 1)


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
        scan.add(chunk)
        if scan.deepest > MAX_JSON_DEPTH:
            return f"JSON that nests more than {MAX_JSON_DEPTH} deep"
        if scan.has_long_word:
            return f"JSON with a number of more than {_MAX_NUMBER} characters, or no JSON"
        if sum(scan.counts[space] for space in _SPACES) > _MAX_SPACES:
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
        counts: of each mark: of quotes, and of the others outside of strings.
        deepest: the greatest number of nested brackets in the last chunk.
        has_long_word: whether a number or another word outside of strings is too long.
        strings: the number of bytes in strings.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys((*_COSTS, *_SPACES), 0)
        self.deepest = self.strings = 0
        self.has_long_word = False
        self._is_ascii, self._has_escapes = True, False
        self._depth, self._in_string = 0, False
        self._end = b""  # of the text outside of strings, if the next chunk goes on with it

    def add(self, chunk: bytes) -> None:
        """Scan the next chunk."""
        self._is_ascii = self._is_ascii and chunk.isascii()
        self._has_escapes = self._has_escapes or b"\\u" in chunk
        text = chunk
        if b"\\" in chunk:
            # A backslash begins an escape, because JSON has none outside of strings. When escapes
            # are removed, each quote begins or ends a string.
            text = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = text.split(b'"')
        outside = b'"'.join(parts[self._in_string :: 2])
        self.strings += len(chunk) - len(outside)  # with one quote of each
        for mark in self.counts:
            self.counts[mark] += len(parts) - 1 if mark == b'"' else outside.count(mark)
        words = self._end + outside
        self.has_long_word = _LONG_WORD in words.translate(_WORDS)
        self._in_string ^= len(parts) % 2 == 0
        self._end = b"" if self._in_string else words[-_MAX_NUMBER:]
        brackets = outside.translate(None, _NO_BRACKETS)
        depths = [*accumulate(map(_DEEPER.__getitem__, brackets), initial=self._depth)]
        self.deepest, self._depth = max(depths), depths[-1]

    def values(self, max_records: int) -> int:
        """The greatest memory of the values, without characters of strings and records."""
        found = (self.counts[mark] // count for mark, count in _RECORD.items())
        num_records = min(max_records, *found)
        return sum(
            cost * (self.counts[mark] - num_records * _RECORD.get(mark, 0))
            for mark, cost in _COSTS.items()
        )

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
