"""The log of one rank in a black box: a file of records, each of which is whole or the last one.

::

    ECHELON STEP LOG 1\\n
    head | payload      head: magic, kind, step, length of the payload, checksum of all of it
    head | payload
    …                   a process that is killed while it writes leaves a shorter file

A record is written at once by the system call ``writev``. From then on it is the kernel's, so a
``kill -9`` of the process does not lose it; only the end of the machine would.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, final

from echelon.checkpoint.checksum import Checksum
from echelon.checkpoint.files import BINARY, NOFOLLOW
from echelon.comm.buffers import available_nbytes
from echelon.errors import BlackboxCorrupt
from echelon.laboratory.kept_values import from_bytes, to_buffers
from echelon.process.plain_file import open_plain

_FILE_MAGIC = b"ECHELON STEP LOG 1\n"
_MAGIC = b"STEP"
_FACTS = struct.Struct("<4sIQQ")  # magic, kind, step, length of the payload
_HEAD_NBYTES = _FACTS.size + 16  # with the checksum
_MAX_BUFFERS = 512  # in one call; the system has a limit
MAX_TEXT = 4000  # characters of an error that is kept


class RecordKind(IntEnum):
    """What a record of a log is."""

    BEGIN = 1  # a step begins: its batch, and the random states
    NOTE = 2  # numbers that the loop has noted of a step
    ERROR = 3  # what has ended this rank


@final
class StepLogWriter:
    """Appends records to a new file.

    Args:
        path: must not exist.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | BINARY
        self._path = path
        # With a file of Python, it is closed where the box is forgotten.
        self._file = os.fdopen(os.open(path, flags, 0o644), "wb", buffering=0)
        self._end = 0
        try:
            self._write([memoryview(_FILE_MAGIC)])
        except OSError:
            self._file.close()
            raise

    def append(self, kind: RecordKind, step: int, value: object, where: str) -> None:
        """Add a record.

        Raises:
            ArgumentError: ``value``, which the message calls ``where``, cannot be kept.
            OSError: it cannot be written; the log is as it was before.
        """
        buffers = to_buffers(value, where)
        length = sum(buffer.nbytes for buffer in buffers)
        facts = _FACTS.pack(_MAGIC, kind, step, length)
        checksum = Checksum()
        for buffer in (memoryview(facts), *buffers):
            checksum.update(buffer)
        self._write([memoryview(facts + checksum.hexdigest().encode()), *buffers])

    def _write(self, buffers: list[memoryview]) -> None:
        left = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        nbytes = sum(buffer.nbytes for buffer in left)
        try:
            while left:
                written = os.writev(self._file.fileno(), left[:_MAX_BUFFERS])
                while left and written >= left[0].nbytes:
                    written -= left.pop(0).nbytes
                if written:
                    left[0] = left[0][written:]
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._end)
            os.lseek(self._file.fileno(), self._end, os.SEEK_SET)
            error.filename = str(self._path)
            raise
        self._end += nbytes

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class Record(NamedTuple):
    """Where a record lies in its file.

    Attributes:
        kind: what it is.
        step: of which step.
        offset: of its head, in bytes.
        nbytes: of its payload.
    """

    kind: RecordKind
    step: int
    offset: int
    nbytes: int


@final
class StepLog:
    """The records of a file, of which payloads are read when they are asked for.

    Attributes:
        path: of the file.
        records: all whole ones, in their order.

    Raises:
        BlackboxCorrupt: it is no log, or was changed.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(len(_FILE_MAGIC))
            if not _FILE_MAGIC.startswith(start):  # a full disk or a kill may have cut it
                raise BlackboxCorrupt("does not begin as the log of a black box", path)
            offset = len(_FILE_MAGIC)
            while offset + _HEAD_NBYTES <= size:
                file.seek(offset)
                magic, kind, step, nbytes = _FACTS.unpack(file.read(_FACTS.size))
                if magic != _MAGIC or kind not in {*RecordKind}:
                    raise BlackboxCorrupt(f"has no record at byte {offset}", path)
                if offset + _HEAD_NBYTES + nbytes > size:
                    break  # it was being written when the process ended
                self.records.append(Record(RecordKind(kind), step, offset, nbytes))
                offset += _HEAD_NBYTES + nbytes

    def steps(self) -> list[int]:
        """The steps that this rank has begun, in their order."""
        return [record.step for record in self.records if record.kind is RecordKind.BEGIN]

    def begin(self, step: int) -> dict[str, Any]:
        """What was kept when a step began.

        Raises:
            BlackboxCorrupt: these are not the bytes that were written.
        """
        return self._read(self._of(RecordKind.BEGIN, step)[-1])

    def notes(self, step: int) -> list[dict[str, Any]]:
        """The numbers that were noted of a step, in their order."""
        return [self._read(record) for record in self._of(RecordKind.NOTE, step)]

    def error(self) -> dict[str, Any] | None:
        """The class and the text of what has ended this rank; None if nothing is known."""
        errors = [record for record in self.records if record.kind is RecordKind.ERROR]
        return self._read(errors[-1]) if errors else None

    def _of(self, kind: RecordKind, step: int) -> Sequence[Record]:
        return [record for record in self.records if (record.kind, record.step) == (kind, step)]

    def _read(self, record: Record) -> dict[str, Any]:
        if record.nbytes > available_nbytes():
            raise BlackboxCorrupt(
                f"has a record of {record.nbytes} bytes at byte {record.offset}, more than there "
                "is memory",
                self.path,
            )
        with open_plain(self.path) as file:
            file.seek(record.offset)
            facts = file.read(_FACTS.size)
            digits = file.read(_HEAD_NBYTES - _FACTS.size)
            data = bytearray(file.read(record.nbytes))
        checksum = Checksum()
        checksum.update(facts)
        checksum.update(memoryview(data))
        if checksum.hexdigest().encode() != digits:
            raise BlackboxCorrupt(
                f"the bytes of step {record.step}, at byte {record.offset}, are not those that "
                "were written",
                self.path,
            )
        value = from_bytes(data, str(self.path))
        if not isinstance(value, dict):
            raise BlackboxCorrupt(f"has something else at byte {record.offset}", self.path)
        return value
