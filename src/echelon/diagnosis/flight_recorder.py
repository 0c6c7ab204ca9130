"""One record per rank of a host, in memory that outlives the rank: its step and its last call.

Unlike torch's flight recorder, this one keeps no history of the last collectives. Each rank writes
its own record. Whoever reports a death or a hang, the launcher or a rank that waited in vain, reads
all of them. The memory is a memfd without a name, so no crash leaves it behind and no disk is
involved::

    record | pid | start ticks | rank | … | last call: slot, position | … | text of slot 1 | …
           | what the rank did in each step, see ``step_rows``

Recording a call must cost next to nothing, so a call that was made before is not formatted again:
its text has a slot already, and writing slot and position makes it the last call. This module
imports neither torch nor anything that does, so that a launcher starts without that delay.
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

from echelon.diagnosis.step_rows import RankSteps, StepRows
from echelon.errors.message_text import text_bytes
from echelon.process.memory_files import create_memory, open_memory
from echelon.process.process_status import ENDED, ProcessStatus, activity

if TYPE_CHECKING:
    from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall

VARIABLE = "ECHELON_FLIGHT_RECORDER"  # in which a launcher names the recorder that it reads

RECORDER_NAME = "echelon flight recorder"  # of the memory, by which others find it in /proc
_HEADER_NBYTES = 4096
# A model with more different calls in a step than slots formats their texts in every step.
_SLOT_NBYTES, _NUM_SLOTS = 512, 1024
_STEPS_START = _HEADER_NBYTES + _SLOT_NBYTES * _NUM_SLOTS
_NBYTES = _STEPS_START + -(-StepRows.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
_CALL_LENGTH, _GROUP_LENGTH, _PLACE_LENGTH = 270, 40, 190  # of the parts of a text, in bytes


class _Field(IntEnum):
    """The place of a number in the header of a record."""

    PID = 0
    START_TICKS = 1
    RANK = 2
    ATTEMPT = 3
    PHASE = 4
    STEP = 5
    CALL = 6
    WAITS_FOR = 7
    THREAD_ID = 8
    NATIVE_ID = 9
    STACKS_FD = 10
    ABSENT_RANK = 11
    TIMEOUT_MS = 12
    SCRIPT_ENDED = 13
    GAVE_UP = 14
    GAVE_UP_CALL = 15
    IN_TORCH = 16
    SCRIPT_WAITS = 17


# Each call writes these, and to look up a member of an enum takes longer than to write it.
_CALL, _WAITS_FOR = int(_Field.CALL), int(_Field.WAITS_FOR)
_SCRIPT_WAITS = int(_Field.SCRIPT_WAITS)


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
        script_waits: whether the thread of its script waits, or gave up, and not only another one.
        in_torch: whether it has called ``init_process_group`` and not ``echelon.init``.
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
    script_waits: bool = False
    in_torch: bool = False

    @property
    def start(self) -> str:
        """The function by which the rank enters its world."""
        return "init_process_group" if self.in_torch else "echelon.init()"

    @property
    def where(self) -> str:
        """How far the rank has come, as text that follows its name."""
        return f"in {self.start}" if self.phase is Phase.STARTING else f"at step {self.step}"

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        status = ProcessStatus.of(self.pid)
        return status is None or status.ended or status.start_ticks != self.start_ticks

    @property
    def doing(self) -> str:
        """What the rank does now, as text that follows its name."""
        if self.ended:
            return ENDED
        if self.phase >= Phase.CLOSING:
            return "has closed its world"
        if self.waits_for is not None:
            return f"waits for rank {self.waits_for}"
        if self.gave_up_on is not None:
            return f"has waited in vain for rank {self.gave_up_on}"
        return activity(self.pid, self.native_id)


@final
class RankRecord:
    """The record of one rank, which that rank writes.

    Args:
        memory: of ``RankRecord.nbytes`` bytes, zeros at first.

    Attributes:
        step_rows: what the rank did in each step.
    """

    nbytes = _NBYTES

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        self._longs = memory[: len(_Field) * 8].cast("Q")
        self.step_rows = StepRows(memory[_STEPS_START : _STEPS_START + StepRows.nbytes])
        self._slots: dict[tuple[CallSignature, CallSite, str], int] = {}
        self._keys: list[tuple[CallSignature, CallSite, str]] = []  # by slot, from slot 1
        self._num_texts = 0
        self._lock = threading.Lock()

    def begin(self, rank: int, attempt: int) -> None:
        """Begin the record, for the process and the thread that call this."""
        status = ProcessStatus.of(os.getpid())
        for field in _Field:
            self._longs[field] = 0
        self._longs[_Field.PID] = os.getpid()
        self._longs[_Field.START_TICKS] = 0 if status is None else status.start_ticks
        self._longs[_Field.RANK], self._longs[_Field.ATTEMPT] = rank, attempt
        self._longs[_Field.THREAD_ID], self._longs[_Field.NATIVE_ID] = (
            threading.get_ident(),
            threading.get_native_id(),
        )
        self.step_rows.clear()
        self._longs[_Field.PHASE] = Phase.STARTING

    def set_phase(self, phase: Phase) -> None:
        """Record how far the rank has come."""
        self._longs[_Field.PHASE] = phase

    def record_step(self, number: int) -> None:
        """Record how many optimizer steps the rank has made."""
        self._longs[_Field.STEP] = number

    def record_call(self, call: CollectiveCall) -> None:
        """Record the last call."""
        key = call.signature, call.place, call.group
        slot = self._slots.get(key) or self._write_text(key)
        self._longs[_CALL] = slot << 32 | call.position & 0xFFFFFFFF

    def wait_for(self, rank: int | None, *, by_script: bool) -> None:
        """Record the rank in the job that this rank waits for; None: it does not wait.

        Args:
            by_script: whether the thread of the script waits.
        """
        self._longs[_WAITS_FOR] = 0 if rank is None else rank + 1
        if rank is not None:
            self._longs[_SCRIPT_WAITS] = by_script

    def give_up(self, rank: int, *, by_script: bool) -> None:
        """Record the rank in the job that this rank has waited for in vain, until its next call."""
        self._longs[_SCRIPT_WAITS] = by_script
        self._longs[_Field.GAVE_UP_CALL] = self._longs[_CALL]
        self._longs[_Field.GAVE_UP] = rank + 1

    def offer_stacks(self, descriptor: int | None) -> None:
        """Record the descriptor to which the process writes its stacks on request."""
        self._longs[_Field.STACKS_FD] = 0 if descriptor is None else descriptor + 1

    def set_timeout(self, timeout_s: float) -> None:
        """Record how long the rank waits for others in one call, in seconds."""
        self._longs[_Field.TIMEOUT_MS] = round(timeout_s * 1e3)

    def end_script(self) -> None:
        """Record that the script has ended; exit handlers and threads may still run."""
        self._longs[_Field.SCRIPT_ENDED] = 1

    def enter_torch(self) -> None:
        """Record that the rank enters its world by ``init_process_group``."""
        self._longs[_Field.IN_TORCH] = 1

    def set_absent_rank(self, rank: int) -> None:
        """Tell the rank of this record, from the launcher, that another rank will never come."""
        self._longs[_Field.ABSENT_RANK] = rank + 1

    @property
    def absent_rank(self) -> int | None:
        """The rank that will never come, according to the launcher."""
        return _optional(self._longs[_Field.ABSENT_RANK])

    def read(self) -> RankStatus | None:
        """What the record says; None where no rank has begun it."""
        longs = self._longs.tolist()
        if longs[_Field.PHASE] == Phase.ABSENT:
            return None
        gave_up_now = longs[_Field.GAVE_UP_CALL] == longs[_CALL]  # not in an earlier call
        return RankStatus(
            rank=longs[_Field.RANK],
            pid=longs[_Field.PID],
            start_ticks=longs[_Field.START_TICKS],
            attempt=longs[_Field.ATTEMPT],
            phase=Phase(longs[_Field.PHASE]),
            step=longs[_Field.STEP],
            call=self._text(longs[_CALL] >> 32, longs[_CALL] & 0xFFFFFFFF),
            waits_for=_optional(longs[_WAITS_FOR]),
            thread_id=longs[_Field.THREAD_ID],
            native_id=longs[_Field.NATIVE_ID],
            stacks_fd=_optional(longs[_Field.STACKS_FD]),
            timeout_s=longs[_Field.TIMEOUT_MS] / 1e3,
            script_ended=bool(longs[_Field.SCRIPT_ENDED]),
            gave_up_on=_optional(longs[_Field.GAVE_UP]) if gave_up_now else None,
            script_waits=bool(longs[_SCRIPT_WAITS]),
            in_torch=bool(longs[_Field.IN_TORCH]),
        )

    def _write_text(self, key: tuple[CallSignature, CallSite, str]) -> int:
        """Write the text of a new call into the oldest slot; returns its number, from 1."""
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
        """The text of a call, as ``str(CollectiveCall)`` gives it."""
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
        """A new recorder, for this process and those that open it.

        Raises:
            SharedMemoryError: the process may not have files of this size.
        """
        nbytes = num_ranks * RankRecord.nbytes  # unused pages take no memory
        what = f"the flight recorder of {num_ranks} ranks"
        descriptor = create_memory(RECORDER_NAME, nbytes, what=what)
        recorder = cls(descriptor, num_ranks)
        recorder._release = weakref.finalize(recorder, os.close, descriptor)
        return recorder

    @classmethod
    def open(cls, path: str) -> Self:
        """The recorder that another process has created.

        Raises:
            OSError: it cannot be reached from here, is no flight recorder, or another user's.
        """
        descriptor = open_memory(path, RECORDER_NAME)
        try:
            return cls(descriptor, os.fstat(descriptor).st_size // RankRecord.nbytes)
        finally:
            os.close(descriptor)

    @classmethod
    def private(cls) -> Self:
        """A recorder with a single record, which nobody else can open."""
        return cls(-1, 1)

    def close(self) -> None:
        """Close the recorder to other processes; its records stay readable here."""
        self._release()

    def statuses(self, attempt: int = 0) -> dict[int, RankStatus]:
        """The statuses that ranks have recorded in an attempt, by rank in the job."""
        known = [status for record in self.rank_records if (status := record.read()) is not None]
        return {status.rank: status for status in known if status.attempt == attempt}

    def step_rows(self, attempt: int) -> dict[int, StepRows]:
        """The tables of the ranks that have begun their records in an attempt, by rank."""
        return {
            status.rank: record.step_rows
            for record in self.rank_records
            if (status := record.read()) is not None and status.attempt == attempt
        }

    def steps(self, attempt: int = 0) -> list[RankSteps]:
        """What ranks did in the steps of an attempt, in their order in the job."""
        by_rank = sorted(self.step_rows(attempt).items())
        return [RankSteps.of(rank, rows.numbers()) for rank, rows in by_rank]


def where_of(rank: int, statuses: Mapping[int, RankStatus]) -> str:
    """How far a rank had come; empty if no rank has entered its world."""
    if rank in statuses:
        return statuses[rank].where
    return next((f"before {status.start}" for status in statuses.values()), "")


def _optional(field: int) -> int | None:
    return field - 1 if field else None


def _cut(text: str, length: int) -> bytes:
    """Shorten ``text`` to ``length`` bytes in the middle, because its ends say the most."""
    encoded = text_bytes(text.replace("\0", " "))
    if len(encoded) <= length:
        return encoded
    half = (length - 3) // 2
    return encoded[:half] + b"..." + encoded[-half:]
