"""Which accesses of memory were found to race."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from echelon.testing.device.clocks import Access, Finding, Line, Memory, Operation, Ranges

Part = tuple[Memory, Ranges]  # the bytes of a tensor


@final
class Races:
    """Notes accesses and finds those without an order.

    Attributes:
        findings: the races, without repetitions.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._known: set[tuple[str, Operation, Operation]] = set()
        self._given_back: dict[Line, list[Memory]] = {}  # in use when it was; by pool

    def operate(
        self,
        operation: Operation,
        line: Line,
        reads: Iterable[Part] = (),
        writes: Iterable[Part] = (),
        cost: float = 0.0,
    ) -> None:
        """An operation of a line."""
        access = Access(line, line.operate(cost), operation)
        for memory, ranges in reads:
            self._note(memory.touch(ranges, access, writes=False))
        for memory, ranges in writes:
            self._note(memory.touch(ranges, access, writes=True))

    def free(self, memory: Memory) -> None:
        """Memory was given back."""
        memory.free()
        if memory.pool is not None and memory.uses_after():
            self._given_back.setdefault(memory.pool, []).append(memory)

    def allocate(self, pool: Line, operation: Operation) -> None:
        """A pool hands out memory; it may be any of its line."""
        for memory in self._given_back.pop(pool, ()):
            late, nbytes = memory.uses_after(), memory.nbytes
            self._note([Finding("use after free", use, operation, nbytes) for use in late])

    def still_used(self) -> list[Operation]:
        """What may still use memory that was given back and was not handed out since."""
        freed = [memory for each in self._given_back.values() for memory in each]
        return [operation for memory in freed for operation in memory.uses_after()]

    def _note(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            key = finding.kind, finding.first, finding.second
            if key not in self._known:
                self._known.add(key)
                self.findings.append(finding)
