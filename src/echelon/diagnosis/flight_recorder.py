"""Where each rank of a host is, in memory that outlives it: its process, its step, its last call.

A flight recorder has a record for each rank of a host. A rank writes its own; whoever reports a
death or a hang reads them all, the launcher or a rank that waited in vain. Like a shared segment it
is a memfd without a name: no crash leaves it behind, and no disk can fill up or be slow under it::

    record | pid | start ticks | rank | … | last call: slot, position | … | text of slot 1 | …

A call must cost next to nothing, so nothing is formatted for one that was made before: its text has
a slot already, and one store of slot and position makes it the last call. This module imports
neither torch nor anything that does, so that a launcher can read a flight recorder at once.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Self, final

from echelon.errors.message_text import text_bytes
from echelon.process.process_status import ProcessStatus, open_memory

if TYPE_CHECKING:
    from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall

VARIABLE = "ECHELON_FLIGHT_RECORDER"  # in which a launcher names the recorder that it reads

_NAME = "echelon flight recorder"
_HEADER_NBYTES = 4096
_SLOT_NBYTES, _NUM_SLOTS = 512, 1024  # a model with more calls in a step pays for texts again
_NBYTES = _HEADER_NBYTES + _SLOT_NBYTES * _NUM_SLOTS
(
    _PID,
    _START_TICKS,
    _RANK,
    _ATTEMPT,
    _PHASE,
    _STEP,
    _CALL,
    _WAITS_FOR,
    _THREAD_ID,
    _NATIVE_ID,
    _STACKS_FD,
    _ABSENT_RANK,
    _TIMEOUT_MS,
    _SCRIPT_ENDED,
    _GAVE_UP,
    _GAVE_UP_CALL,
    _NUM_FIELDS,
) = range(17)
_CALL_LENGTH, _GROUP_LENGTH, _PLACE_LENGTH = 270, 40, 190  # of the parts of a text, in bytes


class Phase(IntEnum):
    """How far a rank has come."""

    ABSENT = 0  # it has not called init
    STARTING = 1  # it is in init
    RUNNING = 2
    CLOSING = 3  # it closes its world, and waits a little for the others
    CLOSED = 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """What the record of a rank says.

    Attributes:
        rank: in the job.
        pid: of its process.
        start_ticks: when that process was started, see ``ProcessStatus``.
        attempt: how often the launcher had restarted the job.
        phase: how far it has come.
        step: optimizer steps that it has made.
        call: the last one that it issued, with position and place; empty before the first.
        waits_for: a rank in the job that it has waited for, for a while; None if it does not wait.
        thread_id: Python's number of the thread that entered the world.
        native_id: the kernel's number of that thread.
        stacks_fd: descriptor of the file to which it writes its stacks; None if it does not.
        timeout_s: seconds that it waits for others in one call; 0 where it has not said so.
        script_ended: whether its script has come to its end, whatever its process still does.
        gave_up_on: a rank in the job that it waited for in vain in its last call, if it did.
    """

    rank: int
    pid: int
    start_ticks: int
    attempt: int
    phase: Phase
    step: int
    call: str
    waits_for: int | None
    thread_id: int
    native_id: int
    stacks_fd: int | None
    timeout_s: float = 0.0
    script_ended: bool = False
    gave_up_on: int | None = None

    @property
    def where(self) -> str:
        """As it reads after the name of the rank."""
        return "in echelon.init()" if self.phase is Phase.STARTING else f"at step {self.step}"

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        status = ProcessStatus.of(self.pid)
        return status is None or status.ended or status.start_ticks != self.start_ticks


@final
class RankRecord:
    """The record of one rank, which that rank writes.

    Args:
        memory: of ``RankRecord.nbytes`` bytes, zeros at first.
    """

    nbytes = _NBYTES

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        self._longs = memory[: _NUM_FIELDS * 8].cast("Q")
        self._slots: dict[tuple[CallSignature, CallSite, str], int] = {}
        self._keys: list[tuple[CallSignature, CallSite, str]] = []  # by slot, from slot 1
        self._num_texts = 0
        self._lock = threading.Lock()

    def begin(self, rank: int, attempt: int) -> None:
        """Begin the record, for the process and the thread that call this."""
        status = ProcessStatus.of(os.getpid())
        for field in range(_NUM_FIELDS):
            self._longs[field] = 0
        self._longs[_PID] = os.getpid()
        self._longs[_START_TICKS] = 0 if status is None else status.start_ticks
        self._longs[_RANK], self._longs[_ATTEMPT] = rank, attempt
        self._longs[_THREAD_ID], self._longs[_NATIVE_ID] = (
            threading.get_ident(),
            threading.get_native_id(),
        )
        self._longs[_PHASE] = Phase.STARTING

    def set_phase(self, phase: Phase) -> None:
        """Note how far the rank has come."""
        self._longs[_PHASE] = phase

    def record_step(self, number: int) -> None:
        """Note how many optimizer steps the rank has made."""
        self._longs[_STEP] = number

    def record_call(self, call: CollectiveCall) -> None:
        """Note the last call."""
        key = call.signature, call.place, call.group
        slot = self._slots.get(key) or self._write_text(key)
        self._longs[_CALL] = slot << 32 | call.position & 0xFFFFFFFF

    def wait_for(self, rank: int | None) -> None:
        """Note for which rank in the job this one waits; None: for none any more."""
        self._longs[_WAITS_FOR] = 0 if rank is None else rank + 1

    def give_up(self, rank: int) -> None:
        """Note for which rank in the job this one has waited in vain; holds until its next call."""
        self._longs[_GAVE_UP_CALL] = self._longs[_CALL]
        self._longs[_GAVE_UP] = rank + 1

    def offer_stacks(self, descriptor: int | None) -> None:
        """Note where the stacks of the process can be read when it is asked for them."""
        self._longs[_STACKS_FD] = 0 if descriptor is None else descriptor + 1

    def set_timeout(self, timeout_s: float) -> None:
        """Note how long the rank waits for others in one call, in seconds."""
        self._longs[_TIMEOUT_MS] = round(timeout_s * 1e3)

    def end_script(self) -> None:
        """Note that the script has come to its end; exit handlers and threads may still run."""
        self._longs[_SCRIPT_ENDED] = 1

    def set_absent_rank(self, rank: int) -> None:
        """Tell the rank of this record that another one will never come; the launcher knows."""
        self._longs[_ABSENT_RANK] = rank + 1

    @property
    def absent_rank(self) -> int | None:
        """The rank that will never come, as the launcher says."""
        return _optional(self._longs[_ABSENT_RANK])

    def read(self) -> RankStatus | None:
        """What the record says; None where no rank has begun it."""
        longs = self._longs.tolist()
        if longs[_PHASE] == Phase.ABSENT:
            return None
        return RankStatus(
            rank=longs[_RANK],
            pid=longs[_PID],
            start_ticks=longs[_START_TICKS],
            attempt=longs[_ATTEMPT],
            phase=Phase(longs[_PHASE]),
            step=longs[_STEP],
            call=self._text(longs[_CALL] >> 32, longs[_CALL] & 0xFFFFFFFF),
            waits_for=_optional(longs[_WAITS_FOR]),
            thread_id=longs[_THREAD_ID],
            native_id=longs[_NATIVE_ID],
            stacks_fd=_optional(longs[_STACKS_FD]),
            timeout_s=longs[_TIMEOUT_MS] / 1e3,
            script_ended=bool(longs[_SCRIPT_ENDED]),
            gave_up_on=_optional(longs[_GAVE_UP] * (longs[_GAVE_UP_CALL] == longs[_CALL])),
        )

    def _write_text(self, key: tuple[CallSignature, CallSite, str]) -> int:
        """Write the text of a new call into the next slot, the oldest one; its number, from 1."""
        call, place, group = key
        parts = (
            _cut(str(call), _CALL_LENGTH),
            _cut(group, _GROUP_LENGTH),
            _cut(str(place), _PLACE_LENGTH),
        )
        text = b"\0".join(parts)
        with self._lock:
            index = self._num_texts % _NUM_SLOTS
            self._num_texts += 1
            if index < len(self._keys):
                self._slots.pop(self._keys[index], None)
                self._keys[index] = key
            else:
                self._keys.append(key)
            start = _HEADER_NBYTES + index * _SLOT_NBYTES
            self._bytes[start : start + 2] = len(text).to_bytes(2, "little")
            self._bytes[start + 2 : start + 2 + len(text)] = text
            self._slots[key] = index + 1
        return index + 1

    def _text(self, slot: int, position: int) -> str:
        """As a ``CollectiveCall`` reads."""
        if not 0 < slot <= _NUM_SLOTS:
            return ""
        start = _HEADER_NBYTES + (slot - 1) * _SLOT_NBYTES
        length = int.from_bytes(self._bytes[start : start + 2], "little")
        text = bytes(self._bytes[start + 2 : start + 2 + length]).decode(errors="replace")
        call, _, rest = text.partition("\0")
        group, _, place = rest.partition("\0")
        return f"{call} (#{position} of group {group!r}) at {place}"


@final
class FlightRecorder:
    """The records of all ranks of a host, in the order of their local ranks.

    Attributes:
        path: under which processes of this host can open it while this one lives.
        rank_records: one for each local rank.
    """

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._release: Callable[[], object] = lambda: None
        memory = memoryview(mmap.mmap(descriptor, num_ranks * RankRecord.nbytes))
        self.rank_records = [
            RankRecord(memory[i * RankRecord.nbytes : (i + 1) * RankRecord.nbytes])
            for i in range(num_ranks)
        ]

    @classmethod
    def create(cls, num_ranks: int) -> Self:
        """A new one, for this process and those that open it."""
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_ranks * RankRecord.nbytes)  # what is not used takes no memory
        recorder = cls(descriptor, num_ranks)
        recorder._release = weakref.finalize(recorder, os.close, descriptor)
        return recorder

    @classmethod
    def open(cls, path: str) -> Self:
        """The one that another process has created.

        Raises:
            OSError: it cannot be reached from here, is no flight recorder, or another user's.
        """
        descriptor = open_memory(path, _NAME)
        try:
            return cls(descriptor, os.fstat(descriptor).st_size // RankRecord.nbytes)
        finally:
            os.close(descriptor)

    @classmethod
    def private(cls) -> Self:
        """One with a single record, which nobody else can open."""
        return cls(-1, 1)

    def close(self) -> None:
        """Let nobody open it any more; its records stay readable here."""
        self._release()

    def statuses(self, attempt: int = 0) -> dict[int, RankStatus]:
        """What ranks have written in an attempt, by rank in the job."""
        known = [status for record in self.rank_records if (status := record.read()) is not None]
        return {status.rank: status for status in known if status.attempt == attempt}


def where_of(rank: int, statuses: Mapping[int, RankStatus]) -> str:
    """How far a rank had come; empty where none of them has called ``echelon.init()``."""
    if rank in statuses:
        return statuses[rank].where
    return "before echelon.init()" if statuses else ""


def _optional(field: int) -> int | None:
    return field - 1 if field else None


def _cut(text: str, length: int) -> bytes:
    """``text`` in at most ``length`` bytes, without its middle: facts stand at both ends."""
    encoded = text_bytes(text.replace("\0", " "))
    if len(encoded) <= length:
        return encoded
    half = (length - 3) // 2
    return encoded[:half] + b"..." + encoded[-half:]
