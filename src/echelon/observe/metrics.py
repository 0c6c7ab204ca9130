"""``metrics.jsonl``: what a run measured, with one JSON object on each line.

===============  =============================================================================
``kind``         fields
===============  =============================================================================
``start``        ``version name time ranks backend device total_steps unit references config``
                 ``unix_s attempt job flops_per_token peak_flops environment``
``step``         ``step time_s loss tokens_per_s``, ``process_peak memory phases`` of rank 0,
                 and the values that the script adds
``evaluation``   ``step time_s loss``
``note``         ``title text``
``save``         ``step time_s seconds nbytes``: a checkpoint of rank 0 was written until ``time_s``
``memory``       ``step rank``, and lists: ``time_s`` since that step began, ``nbytes`` by category,
                 ``units``: ``[unit, start, end, nbytes]`` of the times for which it was unsharded
``timelines``    ``step timelines``: lists by name, of ``[rank, what, start, end]`` in seconds
``ranks``        ``ranks``: for each, ``rank pid process_peak memory comm groups phases``
``waits``        ``waited_s``: for each rank, how long it was there before each other rank, which
                 came last in collectives
``failure``      ``text``: the error that ended the run
``end``          ``time_s steps``
===============  =============================================================================

Seconds (``time_s``) count from the start of the run; bytes are plain numbers. Each line is written
at once, so a run that was killed leaves a file that can be read. A job that its launcher restarts
goes on in the same file, with another ``start``, from which seconds count again.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from echelon import checks
from echelon.errors import ArgumentError
from echelon.process.plain_file import create_plain, open_plain, write_all

_MAX_NBYTES = 1 << 30
_MAX_LINE_NBYTES = 1 << 26
_BLOCK_NBYTES = 1 << 16
_NUMBER = (int, float)
_LOSS = (int, float, type(None))  # null if it was not finite
_Fields = dict[str, type | tuple[type, ...]]
_FIELDS: dict[str, _Fields] = {
    "start": {
        **dict.fromkeys(("name", "time", "backend", "device", "unit"), str),
        **dict.fromkeys(("version", "ranks", "total_steps"), int),
        **dict.fromkeys(("references", "config"), dict),
    },
    "step": {"step": int, "time_s": _NUMBER, "loss": _LOSS, "tokens_per_s": _NUMBER},
    "evaluation": {"step": int, "time_s": _NUMBER, "loss": _LOSS},
    "note": {"title": str, "text": str},
    "save": {"step": int, "time_s": _NUMBER, "seconds": _NUMBER, "nbytes": _NUMBER},
    "memory": {"step": int, "rank": int, "time_s": list, "nbytes": dict},
    "timelines": {"step": int, "timelines": dict},
    "ranks": {"ranks": list},
    "waits": {"waited_s": list},
    "failure": {"text": str},
    "end": {"time_s": _NUMBER, "steps": int},
}
_RANK_FIELDS: _Fields = {
    "rank": int,
    "pid": int,
    "process_peak": _NUMBER,
    "memory": dict,
    "comm": dict,
}


class MetricsWriter:
    """A ``metrics.jsonl``, to which lines are appended; a context manager that closes it.

    Args:
        append: to the lines of a file that is there, instead of to a new file. A last line that was
            cut off, because the run was killed while it was written, is removed.
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        checks.path("path", path)
        checks.flag("append", append)
        # With a file of Python, it is closed where the writer is forgotten. It holds nothing back:
        # a line that did not fit on the disk would come again with the next one.
        self._file = os.fdopen(create_plain(path, appends=append), "r+b", buffering=0)
        self._end = _end_of_lines(self._file)
        os.ftruncate(self._file.fileno(), self._end)

    def write(self, kind: str, **fields: Any) -> None:
        """Write a line; numbers that JSON does not have (NaN, infinity) become null.

        Raises:
            OSError: it cannot be written; the file is as it was before.
        """
        text = json.dumps({"kind": kind, **_finite(fields)}, allow_nan=False, default=str)
        line = f"{text}\n".encode()
        try:
            write_all(self._file.fileno(), line)
        except OSError:
            with suppress(OSError):  # then the end of the line is missing, and readers skip it
                os.ftruncate(self._file.fileno(), self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, or of the one in a folder.

    A last line that was cut off, because the run was killed while it was written, is left out.

    Raises:
        ArgumentError: there is no such file, or a line in it is not an object with a ``kind``.
    """
    checks.path("path", path)
    file = Path(path)
    if file.is_dir():
        file = file / "metrics.jsonl"
    try:
        with open_plain(file, _MAX_NBYTES, follows=file == Path(path)) as lines:
            return list(_parse(file, lines))
    except OSError as error:
        raise ArgumentError(
            f"cannot read {file}: {error.strerror}; give the folder of a run, such as runs/gpt"
        ) from error


def _end_of_lines(file: io.FileIO) -> int:
    """Where the last whole line of a file ends; what follows was cut off."""
    start = file.seek(0, io.SEEK_END)
    while start:
        nbytes = min(start, _BLOCK_NBYTES)
        start = file.seek(start - nbytes)
        if (place := file.read(nbytes).rfind(b"\n")) >= 0:
            return start + place + 1
    return 0


def _parse(file: Path, lines: BinaryIO) -> Iterator[dict[str, Any]]:
    number = 0
    while line := lines.readline(_MAX_LINE_NBYTES):
        number += 1
        if len(line) == _MAX_LINE_NBYTES:
            raise ArgumentError(f"{file}:{number} is longer than {_MAX_LINE_NBYTES} bytes")
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):
                return  # it was cut off
            raise ArgumentError(f"{file}:{number} is not JSON: {error}") from error
        if not isinstance(content, dict) or "kind" not in content:
            text = line[:80].decode(errors="replace").rstrip("\n")
            raise ArgumentError(f"{file}:{number} is not an object with a 'kind': {text}")
        yield content


def check_run(lines: Sequence[dict[str, Any]]) -> None:
    """Refuse lines in which a field of the table above is missing or has another type."""
    for line in lines:
        _check_fields(line, line["kind"], _FIELDS.get(line["kind"], {}))
        for summary in line["ranks"] if line["kind"] == "ranks" else ():
            _check_fields(summary, "rank", _RANK_FIELDS)


def _check_fields(line: Any, kind: str, fields: _Fields) -> None:
    if not isinstance(line, dict):
        raise ArgumentError(f"this is no {kind!r}: {line!r:.80}")
    for name, types in fields.items():
        if not isinstance(line.get(name), types) or (name not in line):
            value = f"{line[name]!r:.40}" if name in line else "missing"
            raise ArgumentError(f"{name!r} is {value} in this {kind!r} line: {line!r:.80}")


def failure_text(error: BaseException) -> str:
    """The first line of an error, with its class.

    Example:
        >>> failure_text(ValueError("no such file\\nlook again"))
        'ValueError: no such file'
    """
    message = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {message}".rstrip(": ")


def _finite(value: Any) -> Any:
    """``value`` with None in place of each float that JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
