"""The rank that failed first, found in the records of all ranks. Pure.

A rank notices a failure as a closed connection or a timeout, so it knows at most its neighbour.
Therefore every rank that stops leaves one record, and whoever has several follows them to the first
cause: rank 2 lost rank 1, rank 1 lost rank 0, rank 0 raised an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from echelon.diagnosis.failure_record import FailureRecord, Reason
from echelon.errors import CollectiveMismatch, CommError, CommTimeout, RankFailed
from echelon.process.process_end import EXIT_RESUMABLE

# A rank that died and could not say why comes first, because the others only noticed it. Then come
# exceptions that ranks raised themselves, then reports about others. A rank that waited in vain
# knows more than one that only lost a connection. A rank that closed its world did as it was told,
# so it is the cause only if nobody else can be.
_ORDER = (
    Reason.DIED,
    Reason.RAISED,
    Reason.EXITED,
    Reason.TIMEOUT,
    Reason.LOST,
    Reason.LEFT,
)


def root_cause(records: Iterable[FailureRecord]) -> FailureRecord | None:
    """The record of the first cause; None if no rank has failed.

    Law: a record that only reports another rank (``follows``) is chosen only if no rank ended by
    itself: died, raised or exited. Of records with the same reason, those of ranks that disagree
    come last. One that has looked at the rank it waited for comes first, then one whose rank has
    left no record, then the earliest one.
    Records of ranks that ended in the regular way never count.
    """
    candidates = [record for record in records if record.reason in _ORDER]
    known = {record.rank for record in candidates}

    def order(record: FailureRecord) -> tuple[object, ...]:
        return (
            _ORDER.index(record.reason),
            record.exit_code == EXIT_RESUMABLE,  # such a rank asks to be started again
            record.is_disagreement,  # a rank that handles an exception issues other calls
            not record.stuck,
            record.failed_rank is None or record.failed_rank in known,
            record.time_s,
        )

    return min(candidates, key=order, default=None)


def end_of_wait_chain(rank: int, waits: Mapping[int, int | None], *, reporter: int) -> int:
    """The rank at the end of the chain of waits that begins with ``rank``.

    Args:
        waits: the rank that each rank waits for, or has waited for in vain; None: it does not wait.
        reporter: the rank that asks, and waits for ``rank``.

    Returns:
        ``rank`` itself if the ranks wait in a circle, in which nobody is first.

    Example:
        >>> end_of_wait_chain(1, {1: 2, 2: 3, 3: None}, reporter=0)
        3
        >>> end_of_wait_chain(1, {1: 0}, reporter=0)
        1
    """
    seen = {reporter}
    root = rank
    while root not in seen:
        seen.add(root)
        awaited = waits.get(root)
        if awaited is None:
            return root
        root = awaited
    return rank


class Diagnosis(NamedTuple):
    """What a rank raises after a failure.

    Attributes:
        is_final: whether records of other ranks that are yet to come cannot change the error.
    """

    error: CommError
    is_final: bool


def peer_failure(
    report: FailureRecord,
    others: Mapping[int, FailureRecord],
    ranks: tuple[int, ...],
    *,
    store_is_gone: bool = False,
    alive: Sequence[int] = (),
    seconds: float = 0.0,
) -> Diagnosis:
    """What this rank raises, given its own report and the records of others.

    Args:
        report: of this rank: ``TIMEOUT`` or ``LOST``.
        others: records of other ranks, by rank in the job.
        ranks: the group's ranks in the job, in order.
        store_is_gone: then a rank without a record may have written one.
        alive: ranks in the job whose processes are known to live.
        seconds: how long this rank has looked for records.
    """
    mismatch = _mismatch(report, others, ranks)
    if mismatch is not None:
        return Diagnosis(mismatch, is_final=True)
    # Some engines do not say which peer they lost. Then any rank without a record may have failed.
    missing = report.missing or tuple(rank for rank in ranks if rank != report.rank)
    known = [others[rank] for rank in missing if rank in others]
    silent = tuple(rank for rank in missing if rank not in others)
    root = root_cause(record for record in known if _has_ended(record))
    if root is None and known and report.missing and report.reason is Reason.LOST:
        root = known[0]  # the peer that was lost first
    if root is not None:
        failed, cause = _blame(root, report.rank)
        error = RankFailed(failed, cause, report.doing)
        return Diagnosis(error, is_final=root.reason is not Reason.TIMEOUT)
    if report.reason is Reason.LOST:
        failed = (silent or missing)[0]
        cause = "died: its connection closed without a word (killed, crashed or exited)"
        if store_is_gone:
            cause = "closed its connection; why is not known, because the store is gone, too"
        elif failed in alive:
            waited = f"but has not said why in {seconds:.1f} s"
            cause = f"closed its connection; its process lives, {waited}"
        return Diagnosis(RankFailed(failed, cause, report.doing), is_final=False)
    rows = "\n".join(
        f"  rank {record.rank} waits in {record.call} of group {record.group!r} at {record.place}"
        for record in known
    )
    timeout = CommTimeout(report.doing, silent or missing, report.seconds, rows)
    return Diagnosis(timeout, is_final=False)


def _has_ended(record: FailureRecord) -> bool:
    """Whether an exception ended the rank, or it closed its world."""
    return bool(record.type) or record.reason is Reason.LEFT


def _blame(record: FailureRecord, reader: int) -> tuple[int, str]:
    """The rank that ``reader`` blames after it has read a record, and the cause."""
    if record.type:
        return record.rank, f"raised {record.type}" + (
            f": {record.message}" if record.message else ""
        )
    if record.reason is Reason.LEFT:
        return record.rank, "closed its world and left"
    if record.failed_rank is not None:
        return record.failed_rank, record.cause
    if record.reason is not Reason.TIMEOUT:
        return record.rank, f"stopped in {record.call} at {record.place}"
    late = next((rank for rank in record.missing if rank != reader), None)
    waited = f"waited {record.seconds:.1f} s"
    if late is None:
        return record.rank, f"gave up after it had {waited} for this rank in {record.call}"
    return late, f"did not come: rank {record.rank} {waited} for it in {record.call}"


def _mismatch(
    report: FailureRecord, others: Mapping[int, FailureRecord], ranks: tuple[int, ...]
) -> CollectiveMismatch | None:
    """The error of ranks in the group that stopped at one position in different calls."""
    position = (report.group, report.position, report.is_p2p)
    stopped = {report.rank: report} | {
        rank: record
        for rank, record in others.items()
        if (record.group, record.position, record.is_p2p) == position
    }
    if report.is_p2p:
        stopped = {rank: record for rank, record in stopped.items() if _meet(report, record)}
        different = any(record.content != report.content for record in stopped.values())
    else:
        different = len({record.call for record in stopped.values()}) > 1 or _lengths_differ(
            {ranks.index(rank): record for rank, record in stopped.items() if record.sends}
        )
    if not different:
        return None
    calls = {rank: record.call_text() for rank, record in stopped.items()}
    if report.is_p2p:
        return CollectiveMismatch.of_message(report.group, calls)
    return CollectiveMismatch(report.group, report.position, calls)


def _lengths_differ(records: Mapping[int, FailureRecord]) -> bool:
    """Whether a rank (in the group) sends another number of elements than its peer expects."""
    return any(
        receiver_record.expects[sender] != sender_record.sends[receiver]
        for receiver, receiver_record in records.items()
        for sender, sender_record in records.items()
    )


def _meet(report: FailureRecord, other: FailureRecord) -> bool:
    """Whether ``other`` is the same record, or of the other end of the same message."""
    if other.rank == report.rank:
        return True
    return (
        other.op != report.op
        and report.missing == (other.rank,)
        and other.missing in ((report.rank,), ())
    )
