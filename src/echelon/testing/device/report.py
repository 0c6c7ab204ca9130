"""Two operations without an order, told to a person."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import torch

from echelon.errors.message_text import counted
from echelon.process.notebook import place_name
from echelon.testing.device.clocks import Finding, Operation

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)


@final
class Frame(NamedTuple):
    """Where a program was."""

    file: str
    function: str
    line: int

    @property
    def is_ours(self) -> bool:
        """Whether it is of the device itself."""
        return self.file.startswith(_OURS)

    @property
    def is_users(self) -> bool:
        """Whether it is neither torch's nor of the device."""
        return not self.is_ours and not self.file.startswith((_TORCH, "<"))

    def __str__(self) -> str:
        return f"{place_name(self.file)}:{self.line}, in {self.function}"


@final
@dataclass(frozen=True)
class RaceReport:
    """What raced.

    Attributes:
        findings: two operations each, of which nothing says which comes first.
        stacks: where the operations were issued, innermost first.
        still_used: what may still use memory that was given back, and was not handed out yet.
    """

    findings: Sequence[Finding]
    stacks: Mapping[Operation, Sequence[Frame]]
    still_used: Sequence[Operation]

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return "no races"
        return "\n\n".join([counted(len(self.findings), "race"), *self.texts()])

    def texts(self) -> list[str]:
        """A text for each race."""
        return [self._text(finding) for finding in self.findings]

    def _text(self, finding: Finding) -> str:
        return "\n".join(
            [
                f"{finding.kind}, in memory of {finding.nbytes} bytes",
                *self._operation("first", finding.first),
                *self._operation("second", finding.second),
                f"  missing: {missing_wait(finding)}",
            ]
        )

    def _operation(self, which: str, operation: Operation) -> list[str]:
        lines = [f"  {which}: {operation.name} on {operation.line}"]
        for frame in users_frames(self.stacks.get(operation, ())):
            lines.append(f"    {frame}")
            if text := linecache.getline(frame.file, frame.line).strip():
                lines.append(f"      {text}")
        return lines


_MOST_FRAMES = 5


def users_frames(stack: Sequence[Frame]) -> list[Frame]:
    """The innermost frames of a stack that are a user's: those of the script and what it calls."""
    frames = []
    for frame in stack:
        if frame.is_users:
            frames.append(frame)
        if frame.function == "<module>" or len(frames) == _MOST_FRAMES:
            break
    return frames


def missing_wait(finding: Finding) -> str:
    """The wait that would give two operations an order."""
    first, second = finding.first.line, finding.second.line
    if finding.kind == "use after free":
        return (
            f"memory went back to the pool of {second} while {first} may use it. Call "
            f"tensor.record_stream() with {first}, or let {second} wait for {first} before the "
            "tensor is dropped"
        )
    if second == "the host":
        return f"the host must wait for {first} (event.synchronize()) before it does this"
    return f"{second} must wait for {first} (wait_stream or wait_event) before it does this"
