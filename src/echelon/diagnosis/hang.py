"""What is told of ranks that do not come, whatever kind of rank they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from echelon.diagnosis.flight_recorder import RankStatus
from echelon.diagnosis.stacks import innermost, shown
from echelon.errors import CommTimeout

_MOST = 2  # ranks that are described in an error; all are in its note


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SilentRank:
    """What was found out about a rank that others wait for.

    Attributes:
        rank: in the job.
        where: such as ``at step 4``.
        activity: such as ``computes``.
        call: the last one that it issued; empty if there is none.
        stack: of the thread that runs the script, the innermost line last; empty if not known.
        silence: why there is no stack.
    """

    rank: int
    where: str
    activity: str
    call: str
    stack: Sequence[str]
    silence: str = ""

    def lines(self) -> list[str]:
        """As rows of an error."""
        rows = [f"  rank {self.rank} {self.where} {self.activity}"]
        rows.append(f"  its last call: {self.call or 'none'}")
        if not self.stack:
            return [*rows, f"  its stack is not known: {self.silence}"]
        return [*rows, "  its stack:", *(f"    {line}" for line in innermost(self.stack))]


def explained(
    error: CommTimeout, findings: Sequence[SilentRank], stacks: Mapping[int, list[str]]
) -> CommTimeout:
    """``error`` with what was found out about the ranks that hold up the others.

    Args:
        findings: at least one.
        stacks: of all ranks that could be asked, for the note of the error.
    """
    rows = [line for finding in findings[:_MOST] for line in finding.lines()]
    if len(findings) > _MOST:
        rows.append(f"  and {len(findings) - _MOST} more ranks did not come")
    found = CommTimeout(
        error.doing,
        error.missing,
        error.seconds,
        "\n".join([*([error.others] if error.others else []), *rows]),
        stuck={finding.rank: f"{finding.where} {finding.activity}" for finding in findings},
    )
    if stacks:
        found.add_note(f"The Python stacks of the ranks of this host:\n{shown(stacks)}")
    return found


def finding_of(entry: RankStatus, doing: str, stack: Sequence[str]) -> SilentRank:
    """What a page of the logbook says of a rank that is ``doing`` something, with its stack."""
    silence = "its process did not answer"
    if entry.stacks is None:
        silence = "the script has its own use for SIGUSR2"
    elif "stopped" in doing:
        silence = "a process that is stopped cannot tell it"
    return SilentRank(
        rank=entry.rank,
        where=entry.where,
        activity=doing,
        call=entry.call,
        stack=stack,
        silence=silence,
    )
