"""Failure records as a few lines for a person, the first of which names the cause. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from echelon.diagnosis.failure_record import STACKS_FILE, FailureRecord, Reason
from echelon.diagnosis.flight_recorder import RankStatus, where_of
from echelon.diagnosis.root_cause import root_cause
from echelon.diagnosis.stacks import is_user_file, of_crash, stack_rows
from echelon.errors import EchelonError
from echelon.errors.message_text import by_value, ranks_text, without_middle

MAX_LINES = 25
_MESSAGE_LINES, _STUCK_LINES, _TRACE_LINES, _LOG_LINES, _OTHER_LINES = 8, 14, 8, 10, 3
_NOTE_LINES = 2
_WIDTH = 400  # characters of one line
_FRAME = re.compile(r'  File "(.*)", line \d+')


def failure_report(
    records: Iterable[FailureRecord],
    notes: Sequence[str],
    statuses: Mapping[int, RankStatus] | None = None,
    agent_log: str = "",
) -> list[str]:
    """At most 25 lines, the first of which names the rank, where it was, and the cause.

    Args:
        records: one for each rank that has failed, as far as they left any.
        notes: lines for the end, such as where the logs are.
        statuses: what ranks wrote into the flight recorder, by rank.
        agent_log: what torch's agent wrote, which is shown where no record tells of a cause.
    """
    by_rank = {record.rank: record for record in records}
    cause = root_cause(by_rank.values())
    if cause is None:
        tail = _tail(agent_log, _LOG_LINES) or ["  it wrote nothing"]
        return ["torch's agent could not run the ranks; it wrote:", *tail, *notes][:MAX_LINES]
    alike = _alike(cause, by_rank.values())
    others = [
        record
        for rank, record in sorted(by_rank.items())
        if record not in alike and record.type  # a process without a record has nothing to tell
    ]
    failed = cause.failed_rank
    if cause.reason is Reason.TIMEOUT:
        lines = _hang_lines(cause, statuses or {})
    elif cause.reason is Reason.LOST and failed is not None and failed not in by_rank:
        where = where_of(failed, statuses or {})
        left = FailureRecord(rank=failed, reason=Reason.LEFT, where=where)
        lines, others = _process_lines(left, statuses or {}), [cause, *others]
    elif cause.is_disagreement:
        lines = _disagreement_lines(alike)
    elif cause.type:
        lines = _exception_lines(cause)
    else:
        lines = _process_lines(cause, statuses or {})
    told_record = None if cause in others else cause
    return _finished(lines, told_record, sorted(others, key=lambda record: record.rank), notes)


def _alike(cause: FailureRecord, records: Iterable[FailureRecord]) -> list[FailureRecord]:
    """The records of one failure, in rank order: ranks that disagree all raise, each by itself."""
    if not cause.is_disagreement:
        return [cause]
    alike = [
        record
        for record in records
        if (record.type, record.first_line) == (cause.type, cause.first_line)
    ]
    return sorted(alike, key=lambda record: record.rank)


def _disagreement_lines(records: Sequence[FailureRecord]) -> list[str]:
    """The lines for ranks that disagree; which of them raised first says nothing."""
    record = max(records, key=lambda record: len(record.message))  # one may know of more ranks
    wheres = {record.rank: record.where for record in records}
    if len(set(wheres.values())) == 1:
        return _exception_lines(record)
    headline, *lines = _exception_lines(replace(record, where=""))
    return [headline, _cut(f"  {by_value(wheres)}"), *lines]


def _exception_lines(record: FailureRecord) -> list[str]:
    """The lines for a rank that raised."""
    message = record.message.strip().split("\n")[1:]
    rows = _distinct(message) if record.is_disagreement else message
    lines = [record.headline, *(f"  {line}" for line in _ends(rows))]
    lines = [_cut_of(record, line) for line in lines]
    # Frames and their source are indented; the message at the end is not.
    trace = [line for line in record.traceback.split("\n") if line.startswith("  ")]
    trace = [line for line in trace if line.strip() not in {line.strip() for line in message}]
    if _is_ours(record):  # raised on purpose
        trace = _frames_of_user(trace) or trace
    if record.place and record.place not in record.message:
        lines.append(_cut(f"  at {record.place}"))
    if shown := _end_of_trace(trace):
        of_rank = [f"  on rank {record.rank}:"] if record.is_disagreement else []
        lines += ["", *of_rank, *map(_cut, shown)]
    if notes := _notes(record):
        lines += ["", *map(_cut, notes)]
    return lines


def _end_of_trace(trace: Sequence[str]) -> Sequence[str]:
    """The last frames of a traceback, the first of them whole, without what starts the script."""
    files = [_FRAME.match(line) for line in trace]
    users = [i for i, frame in enumerate(files) if frame and is_user_file(frame[1])]
    begin = max(users[0] if users else 0, len(trace) - _TRACE_LINES)
    return trace[next((i for i in range(begin, len(trace)) if files[i]), begin) :]


def _ends(rows: Sequence[str]) -> list[str]:
    """As many rows as are shown: the last is among them, for messages end with what to do."""
    if len(rows) <= _MESSAGE_LINES:
        return [*rows]
    shown = rows[: _MESSAGE_LINES - 2]
    return [*shown, f"  ({len(rows) - _MESSAGE_LINES + 1} more lines)", rows[-1]]


def _distinct(rows: Sequence[str]) -> list[str]:
    """As many rows as are shown: of many ranks, one that differs must be among them."""
    texts = [row.partition(": ")[2] or row for row in rows]
    first = sorted(range(len(rows)), key=lambda index: texts.index(texts[index]) != index)
    return [rows[index] for index in sorted(first[:_MESSAGE_LINES])]


def _frames_of_user(trace: Sequence[str]) -> list[str]:
    """The lines of a traceback but those of this library, of torch and of Python's own modules."""
    lines: list[str] = []
    is_users = False
    for line in trace:
        if frame := _FRAME.match(line):
            is_users = is_user_file(frame[1])
        if is_users:
            lines.append(line)
    return lines


def _notes(record: FailureRecord) -> list[str]:
    """What was added to the exception, such as a known cause; a traceback ends with it."""
    last = record.message.strip().split("\n")[-1]
    if not last:
        return []
    _, message, notes = record.traceback.rstrip().rpartition(last)
    return [line for line in notes.split("\n") if line.strip()][:_NOTE_LINES] if message else []


def _hang_lines(record: FailureRecord, statuses: Mapping[int, RankStatus]) -> list[str]:
    """The lines for a rank that waited in vain; they are about the one that held it up."""
    rank = record.failed_rank
    if rank is not None and not record.stuck:  # nobody could look at it
        record = replace(record, stuck=f"{where_of(rank, statuses)} did not come".strip())
    rows = record.message.strip().split("\n")[1:]
    shown = [row for row in rows if row.strip() != f"rank {rank} {record.stuck}"][:_STUCK_LINES]
    lines = [record.headline, *shown]
    if rank != record.rank:
        lines.append(f"  rank {record.rank} waited in {record.doing}")
    if record.stacks:
        name = STACKS_FILE.format("error")
        lines.append(
            f"  the stacks of all ranks are in {name}, in the folder of rank {record.rank}"
        )
    return [_cut(line) for line in lines]


def _process_lines(record: FailureRecord, statuses: Mapping[int, RankStatus]) -> list[str]:
    """The lines for a rank whose process ended without a record of its own."""
    tail = _tail(record.log, _LOG_LINES)
    last = tail[-1].strip() if tail else ""
    headline = record.headline
    raised = "Traceback (most recent call last)" in record.log
    if raised and (record.exit_code or 0) > 0 and re.match(r"[A-Za-z_][\w.]*(: |$)", last):
        headline = f"rank {record.rank} {record.where}".rstrip() + f" raised {last}"
    lines = [_cut(headline)]
    status = statuses.get(record.rank)
    if status is not None and status.call:
        lines.append(_cut(f"  its last call: {status.call}"))
    if crashed := of_crash(record.log):
        return [*lines, *map(_cut, stack_rows(crashed, ""))]
    return [*lines, *(["  the end of its standard error:", *tail] if tail else [])]


def _finished(
    lines: Sequence[str],
    told_record: FailureRecord | None,
    others: Sequence[FailureRecord],
    notes: Sequence[str],
) -> list[str]:
    """``lines`` with what else happened and the notes, within the limit.

    Args:
        told_record: whose message ``lines`` have.
    """
    by_error: dict[object, list[FailureRecord]] = {}
    for record in others:
        by_error.setdefault(_error_of(record), []).append(record)
    same = by_error.pop(_error_of(told_record), []) if told_record is not None else []
    shown = [*by_error.values()][:_OTHER_LINES]
    ending = [f"then {_ranks_of(same)} raised the same"] if same else []
    for first, *more in shown:
        ending.append(_cut_of(first, f"then {first.headline}"))
        if more:
            ending.append(f"and {_ranks_of(more)} raised the same")
    left = len(others) - len(same) - sum(map(len, shown))
    if left:
        ending.append(f"and {left} more ranks failed after it")
    ending = ["", *ending, *notes]
    return [*lines[: MAX_LINES - len(ending)], *ending]


def _error_of(record: FailureRecord) -> object:
    """What records of the same exception have in common; other records have it alone."""
    raised = record.type and record.reason is Reason.RAISED
    return (record.type, record.message) if raised else record.rank


def _ranks_of(records: Sequence[FailureRecord]) -> str:
    return ranks_text([record.rank for record in records])


def _tail(text: str, count: int) -> list[str]:
    """The last lines that hold something, indented."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [_cut(f"  {line}") for line in lines[-count:]]


def _is_ours(record: FailureRecord) -> bool:
    return EchelonError.revived(record.type, record.message, {}) is not None


def _cut_of(record: FailureRecord, line: str) -> str:
    """A line of a message; whole where the error is ours, for it says somewhere what to do."""
    return line if _is_ours(record) else _cut(line)


def _cut(line: str) -> str:
    """``line`` without its middle where it is long: paths stand there, and facts at the end."""
    return without_middle(line, _WIDTH)
