"""A table of what a rank spent its time on in each step, in memory that others can read.

::

    steps so far │ stride │ rows │ is a stage │ … │ totals │ row │ row │ …

The table has a fixed size. When it is full, every second row goes, and from then on every second
step is kept, so the rows always cover the whole run. All ranks make the same steps, so they keep
the same ones. The totals count every step but the first, which also allocates and warms up.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import add
from typing import NamedTuple, Self, final

_ROW_LENGTH, _HEADER_LENGTH = 24, 8  # in numbers of 8 bytes
_NUM_ROWS = 168
# Places in the header.
_NUM_STEPS, _STRIDE, _FILLED, _IS_STAGE, _NOTED_ROWS, _EPOCH_STEPS, _MAY_BE_UNEQUAL = range(7)
_ROW = struct.Struct(f"{_ROW_LENGTH}Q")


class Activity(IntEnum):
    """What a rank is busy with; the value is its place in a row."""

    OTHER = 0
    BEFORE_BACKWARD = 1  # of a model whose forward is not seen
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    LOADING = 5
    SAVING = 6
    COLLECTING = 7
    COMMUNICATION = 8
    PROCESSOR = 9  # ready to run, but the kernel or the process was busy with something else

    @property
    def text(self) -> str:
        """What the rank did, as text that follows a comma."""
        return _TEXTS[self]


_TEXTS = {
    Activity.OTHER: "outside of forward, backward and optimizer: in data loading or other code",
    Activity.BEFORE_BACKWARD: "before backward: in data loading or in forward",
    Activity.FORWARD: "in forward",
    Activity.BACKWARD: "in backward",
    Activity.OPTIMIZER: "in the step of the optimizer",
    Activity.LOADING: "in data loading",
    Activity.SAVING: "in saving",
    Activity.COLLECTING: "in garbage collection",
    Activity.COMMUNICATION: "in communication",
    Activity.PROCESSOR: "without a processor",
}


class StepTimes(NamedTuple):
    """What one rank did in one step, or in all of them.

    Attributes:
        wall_ns: from the end of the step before to the end of this one.
        spans_ns: by ``Activity``: on a processor, or blocked.
        blocked_ns: by ``Activity``: neither on a processor nor ready for one.
        minor_faults: page faults that needed no disk: memory that was touched for the first time.
        major_faults: page faults that needed a disk.
    """

    wall_ns: int
    spans_ns: tuple[int, ...]
    blocked_ns: tuple[int, ...]
    minor_faults: int = 0
    major_faults: int = 0

    @classmethod
    def of(cls, row: Sequence[int]) -> Self:
        """The content of a row after its first number, which is the step's."""
        n = len(Activity)
        return cls(row[1], tuple(row[2 : 2 + n]), tuple(row[2 + n : 2 + 2 * n]), *row[2 + 2 * n :])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankSteps:
    """What one rank did.

    Attributes:
        rank: in the job.
        num_steps: that it has made in this world.
        is_stage: whether it ran stages of a pipeline, which need not be equal.
        totals: over all steps but the first.
        steps: by the number of the step in this world, from 0; of a long run, some of them.
    """

    rank: int
    num_steps: int = 0
    is_stage: bool = False
    totals: StepTimes
    steps: Mapping[int, StepTimes] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: int, numbers: Sequence[int]) -> Self:
        """The steps in a table, as ``StepRows.numbers`` gives it."""
        rows = [
            numbers[start : start + _ROW_LENGTH]
            for start in range(_HEADER_LENGTH, len(numbers), _ROW_LENGTH)
        ]
        return cls(
            rank=rank,
            num_steps=numbers[_NUM_STEPS],
            is_stage=bool(numbers[_IS_STAGE]),
            totals=StepTimes.of(rows[0]),
            steps={row[0]: StepTimes.of(row) for row in rows[1:]},
        )


@final
class StepRows:
    """The table of one rank, which that rank writes.

    Args:
        memory: of ``StepRows.nbytes`` bytes.

    Attributes:
        peers: the tables of the ranks whose memory can be read here, by rank in the job.
        has_told_rows: whether the user has been told what the noted rows of all ranks say.
    """

    nbytes = 8 * (_HEADER_LENGTH + _ROW_LENGTH * (1 + _NUM_ROWS))

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory
        self._longs = memory.cast("Q")
        self._totals = [0] * _ROW_LENGTH
        self.peers: Callable[[], Mapping[int, StepRows]] = dict
        self.has_told_rows = False

    @classmethod
    def private(cls) -> Self:
        """A table that nobody else reads."""
        rows = cls(memoryview(bytearray(cls.nbytes)))
        rows.clear()
        return rows

    def clear(self) -> None:
        """Begin the table."""
        for i in range(_HEADER_LENGTH):
            self._longs[i] = 0
        self._longs[_STRIDE] = 1
        self._totals = [0] * _ROW_LENGTH
        self._write(0, self._totals)

    def call_stage(self) -> None:
        """Note that this rank runs stages of a pipeline."""
        self._longs[_IS_STAGE] = 1

    def note_rows(self, digest: int) -> None:
        """Note a number that stands for the rows of the first batches; 0: nothing is known."""
        self._longs[_NOTED_ROWS] = digest

    def end_epoch(self, num_steps: int) -> None:
        """Note that a pass over the data has ended after ``num_steps`` steps; the first stays."""
        if not self._longs[_EPOCH_STEPS]:
            self._longs[_EPOCH_STEPS] = num_steps

    def allow_unequal(self) -> None:
        """Note that ranks may have different numbers of batches."""
        self._longs[_MAY_BE_UNEQUAL] = 1

    @property
    def num_steps(self) -> int:
        """The number of steps that the rank has made in this world."""
        return self._longs[_NUM_STEPS]

    @property
    def noted_rows(self) -> int:
        """The number of ``note_rows``."""
        return self._longs[_NOTED_ROWS]

    @property
    def steps_of_epoch(self) -> int:
        """After how many steps the first pass over the data has ended; 0: it has not."""
        return self._longs[_EPOCH_STEPS]

    @property
    def may_be_unequal(self) -> bool:
        """Whether ranks may have different numbers of batches."""
        return bool(self._longs[_MAY_BE_UNEQUAL])

    def add(self, times: Sequence[int]) -> None:
        """Add a step.

        Args:
            times: the numbers of a ``StepTimes``, one after the other.
        """
        number = self._longs[_NUM_STEPS]
        row = [number, *times]
        if number:
            self._totals = list(map(add, self._totals, row))
            self._write(0, self._totals)
        if number % self._longs[_STRIDE] == 0:
            if self._longs[_FILLED] == _NUM_ROWS:
                self._thin_out()
            if number % self._longs[_STRIDE] == 0:
                self._longs[_FILLED] += 1
                self._write(self._longs[_FILLED], row)
        self._longs[_NUM_STEPS] = number + 1

    def totals(self) -> StepTimes:
        """What the rank did in all steps but the first."""
        return StepTimes.of(self._totals)

    def numbers(self) -> list[int]:
        """All numbers of the table that have been written."""
        length = _HEADER_LENGTH + _ROW_LENGTH * (1 + self._longs[_FILLED])
        return self._longs[:length].tolist()

    def _thin_out(self) -> None:
        """Keep every second row."""
        for i in range(1, _NUM_ROWS // 2 + 1):
            self._write(i, _ROW.unpack_from(self._bytes, _place(2 * i - 1)))
        self._longs[_FILLED] = _NUM_ROWS // 2
        self._longs[_STRIDE] *= 2

    def _write(self, index: int, row: Sequence[int]) -> None:
        _ROW.pack_into(self._bytes, _place(index), *row)


def _place(index: int) -> int:
    return 8 * (_HEADER_LENGTH + index * _ROW_LENGTH)
