"""From what ranks and torchrun's agent left behind to a few lines that name the cause. Pure."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.diagnosis.failure_record import STACKS_FILE, FailureRecord
from echelon.diagnosis.flight_recorder import RankStatus
from echelon.diagnosis.stacks import innermost, of_crash

MAX_LINES = 25
_MESSAGE_LINES, _STUCK_LINES, _TRACE_LINES, _LOG_LINES, _OTHER_LINES = 8, 14, 8, 10, 3
_WIDTH = 400  # characters of one line


@dataclass(frozen=True, slots=True)
class Exit:
    """How one process ended, as the agent saw it.

    Attributes:
        code: exit code; negative for a signal.
        closed: whether the agent ended it, because another one had failed.
    """

    code: int
    closed: bool

    @property
    def own(self) -> bool:
        """Whether the process ended itself: also while the agent was about to end it."""
        return not self.closed or self.code > 0


def threads_per_rank(ranks: int) -> int:
    """How many torch threads each rank gets when the ranks of one host share its cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def cause_text(
    records: Mapping[int, FailureRecord],
    exits: Mapping[int, Exit],
    logs: Mapping[int, str],
    agent_log: str,
    notes: Sequence[str],
    entries: Mapping[int, RankStatus] | None = None,
) -> list[str]:
    """At most 25 lines, the first of which names the rank, where it was, and the cause.

    Args:
        records: what ranks wrote before they ended, by rank.
        exits: how processes ended, by rank.
        logs: the standard error of each rank.
        agent_log: what torchrun wrote.
        notes: lines for the end, such as where the logs are.
        entries: what ranks wrote into the logbook, by rank.
    """
    others = [record for _, record in sorted(records.items())]

    def died(rank: int, exit: Exit) -> list[str]:
        lines = _process_lines(_Dead(rank, exit, logs.get(rank, ""), entries or {}))
        return _closed(lines, others, notes)

    # A rank that died by itself and could not say why comes first: the others only noticed.
    for rank, exit in sorted(exits.items()):
        if not exit.closed and rank not in records and exit.code < 0:
            return died(rank, exit)
    own = sorted((r for r in records.values() if not r.follows), key=lambda r: r.time_s)
    if own:
        return failure_text(own[0], [r for r in others if r is not own[0]], notes)
    for rank, exit in sorted(exits.items()):
        if exit.own and rank not in records:
            return died(rank, exit)
    late = sorted((r for r in others if r.type == "CommTimeout"), key=lambda r: r.time_s)
    for record in sorted(late, key=lambda r: not r.stuck):  # the first that found something out
        return _hang_text(record, [r for r in others if r is not record], notes, entries or {})
    for record in others:  # all that is left: somebody noticed that a rank was gone
        gone = record.failed_rank
        if gone is not None and gone not in records and gone not in exits:
            return died(gone, Exit(0, False))
    if others:
        return failure_text(others[0], others[1:], notes)
    tail = _tail(agent_log, _LOG_LINES) or ["  it wrote nothing"]
    return ["torchrun could not run the ranks; it wrote:", *tail, *notes][:MAX_LINES]


def failure_text(
    record: FailureRecord, others: Sequence[FailureRecord], notes: Sequence[str]
) -> list[str]:
    """The lines for a rank that raised."""
    message = record.message.strip().split("\n")[1:]
    lines = [_cut(record.headline), *(_cut(f"  {line}") for line in message[:_MESSAGE_LINES])]
    # Frames and their source are indented; the message at the end is not.
    trace = [line for line in record.traceback.split("\n") if line.startswith("  ")]
    trace = [line for line in trace if line.strip() not in {part.strip() for part in message}]
    if record.place:
        lines.append(_cut(f"  at {record.place}"))
    if trace:
        shown = trace[-_TRACE_LINES:]
        if not shown[0].lstrip().startswith("File "):
            shown = shown[1:]
        lines += ["", *map(_cut, shown)]
    return _closed(lines, others, notes)


def _hang_text(
    record: FailureRecord,
    others: Sequence[FailureRecord],
    notes: Sequence[str],
    entries: Mapping[int, RankStatus],
) -> list[str]:
    """The lines for a rank that waited in vain; they are about the one that held it up."""
    rank = record.failed_rank
    if rank is not None and not record.stuck:  # nobody could look at it
        record = replace(record, stuck=f"{_where(rank, entries)} did not come".strip())
    rows = record.message.strip().split("\n")[1:]
    found = [row for row in rows if row.strip() != f"rank {rank} {record.stuck}"][:_STUCK_LINES]
    lines = [record.headline, *found]
    if rank != record.rank:
        lines.append(f"  rank {record.rank} waited in {record.doing}")
    if record.stacks:
        name = STACKS_FILE.format("error")
        lines.append(
            f"  the stacks of all ranks are in {name}, in the folder of rank {record.rank}"
        )
    lines = [_cut(line) for line in lines]
    return _closed(lines, others, notes)


@dataclass(frozen=True, slots=True)
class _Dead:
    """A rank that left no record."""

    rank: int
    exit: Exit
    log: str
    entries: Mapping[int, RankStatus]


def _process_lines(dead: _Dead) -> list[str]:
    """The lines for a rank that left no record."""
    tail = _tail(dead.log, _LOG_LINES)
    last = tail[-1].strip() if tail else ""
    code = dead.exit.code
    subject = f"rank {dead.rank} {_where(dead.rank, dead.entries)}".rstrip()
    if code < 0:
        headline = f"{subject} was killed by {_signal_name(-code)}"
    elif code == 0:
        headline = f"{subject} exited with code 0 while others were waiting"
    elif (
        re.match(r"[A-Za-z_][\w.]*(: |$)", last) and "Traceback (most recent call last)" in dead.log
    ):
        headline = f"{subject} raised {last}"
    else:
        headline = f"{subject} exited with code {code}"
    lines = [_cut(headline)]
    entry = dead.entries.get(dead.rank)
    if entry is not None and entry.call:
        lines.append(_cut(f"  its last call: {entry.call}"))
    if crashed := of_crash(dead.log):
        return [*lines, "  its stack:", *(_cut(f"    {line}") for line in innermost(crashed))]
    return [*lines, *(["  the end of its standard error:", *tail] if tail else [])]


def _where(rank: int, entries: Mapping[int, RankStatus]) -> str:
    """How far a rank had come; empty where none of them has called ``echelon.init()``."""
    if rank in entries:
        return entries[rank].where
    return "before echelon.init()" if entries else ""


def _closed(
    lines: Sequence[str], others: Sequence[FailureRecord], notes: Sequence[str]
) -> list[str]:
    """``lines`` with what else happened and the notes, within the limit."""
    ending = [_cut(f"then {record.headline}") for record in others[:_OTHER_LINES]]
    if len(others) > _OTHER_LINES:
        ending.append(f"and {len(others) - _OTHER_LINES} more ranks failed after it")
    ending = ["", *ending, *notes]
    return [*lines[: MAX_LINES - len(ending)], *ending]


def _tail(text: str, count: int) -> list[str]:
    """The last lines that hold something, indented."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [_cut(f"  {line}") for line in lines[-count:]]


def _cut(line: str) -> str:
    """``line`` without its middle where it is long: paths stand there, and facts at the end."""
    if len(line) <= _WIDTH:
        return line
    return f"{line[: _WIDTH // 2]} … {line[3 - _WIDTH // 2 :]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
