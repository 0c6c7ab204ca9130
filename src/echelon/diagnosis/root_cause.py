"""Which rank is to blame, from what all of them say. Pure.

A rank learns of trouble as a closed connection or as time that is up: it knows its neighbour at
most. So every rank that stops leaves one record, and whoever has several follows them to the first
cause: rank 2 lost rank 1, rank 1 lost rank 0, rank 0 raised an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from echelon.diagnosis.failure_record import FailureRecord, Reason
from echelon.errors import CollectiveMismatch, CommError, CommTimeout, RankFailed

# A rank that died by itself and could not say why comes first: the others only noticed. Then what
# ranks raised themselves, then what they report of others; who waited in vain knows more than who
# only lost a connection.
_ORDER = (
    Reason.DIED,
    Reason.RAISED,
    Reason.EXITED,
    Reason.TIMEOUT,
    Reason.LOST,
    Reason.LEFT,
)


def root_cause(records: Iterable[FailureRecord]) -> FailureRecord | None:
    """The record that tells of the first cause; None where no rank has failed.

    Law: a record that only reports another rank (``follows``) is chosen only if no rank ended by
    itself. Among those, one that has looked at the rank it waited for comes first, then one whose
    rank has left no record; then the earliest one.
    """
    candidates = [record for record in records if record.reason in _ORDER]
    known = {record.rank for record in candidates}

    def order(record: FailureRecord) -> tuple[object, ...]:
        return (
            _ORDER.index(record.reason),
            record.exit_code == os.EX_TEMPFAIL,  # it has asked to be started again
            not record.stuck,
            record.failed_rank is None or record.failed_rank in known,
            record.time_s,
        )

    return min(candidates, key=order, default=None)


def held_up_by(rank: int, waits: Mapping[int, int | None], *, reporter: int) -> int:
    """The rank that ``rank`` waits for, through others that wait, too.

    Args:
        waits: for which rank each one waits, or has waited in vain; None: for none.
        reporter: the rank that asks, and waits for ``rank``.

    Returns:
        ``rank`` itself where ranks wait in a circle, in which nobody is first.

    Example:
        >>> held_up_by(1, {1: 2, 2: 3, 3: None}, reporter=0)
        3
        >>> held_up_by(1, {1: 0}, reporter=0)
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


def peer_failure(
    mine: FailureRecord,
    others: Mapping[int, FailureRecord],
    ranks: tuple[int, ...],
    *,
    store_is_gone: bool = False,
    alive: Sequence[int] = (),
    seconds: float = 0.0,
) -> tuple[CommError, bool]:
    """What this rank raises, given the records of others, and whether that is final.

    Args:
        mine: what happened here: ``TIMEOUT`` or ``LOST``.
        others: records of other ranks, by rank in the job.
        ranks: the group's ranks in the job, in order.
        store_is_gone: so a rank without a record may have written one.
        alive: ranks in the job whose processes are known to live.
        seconds: for how long records have been looked for.
    """
    mismatch = _mismatch(mine, others, ranks)
    if mismatch is not None:
        return mismatch, True
    # An engine that does not say whom it lost: whoever wrote no record has not stopped by himself.
    missing = mine.missing or tuple(rank for rank in ranks if rank != mine.rank)
    known = [others[rank] for rank in missing if rank in others]
    silent = tuple(rank for rank in missing if rank not in others)
    root = root_cause(record for record in known if _has_ended(record))
    if root is None and known and mine.missing and mine.reason is Reason.LOST:
        root = known[0]  # the peer that was lost first
    if root is not None:
        failed, cause = _blame(root, mine.rank)
        return RankFailed(failed, cause, mine.doing), root.reason is not Reason.TIMEOUT
    if mine.reason is Reason.LOST:
        failed = (silent or missing)[0]
        cause = "died: its connection closed without a word (killed, crashed or exited)"
        if store_is_gone:
            cause = "closed its connection; why is not known, because the store is gone, too"
        elif failed in alive:
            waited = f"but has not said why in {seconds:.1f} s"
            cause = f"closed its connection; its process lives, {waited}"
        return RankFailed(failed, cause, mine.doing), False
    rows = "\n".join(
        f"  rank {record.rank} waits in {record.call} of group {record.group!r} at {record.place}"
        for record in known
    )
    return CommTimeout(mine.doing, silent or missing, mine.seconds, rows), False


def _has_ended(record: FailureRecord) -> bool:
    """Whether an exception of its own ended the rank, or it closed its world."""
    return bool(record.type) or record.reason is Reason.LEFT


def _blame(record: FailureRecord, reader: int) -> tuple[int, str]:
    """The rank that a record leads ``reader`` to, and what is wrong with it."""
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
    mine: FailureRecord, others: Mapping[int, FailureRecord], ranks: tuple[int, ...]
) -> CollectiveMismatch | None:
    """Ranks of the group that stopped at the same position in different calls."""
    position = (mine.group, mine.position, mine.is_p2p)
    here = {mine.rank: mine} | {
        rank: record
        for rank, record in others.items()
        if (record.group, record.position, record.is_p2p) == position
    }
    if mine.is_p2p:
        here = {rank: record for rank, record in here.items() if _meet(mine, record)}
        different = any(_content(record) != _content(mine) for record in here.values())
    else:
        different = len({record.call for record in here.values()}) > 1 or _lengths_differ(
            {ranks.index(rank): record for rank, record in here.items() if record.sends}
        )
    if not different:
        return None
    calls = {ranks.index(rank): record.call_text() for rank, record in here.items()}
    if mine.is_p2p:
        return CollectiveMismatch.of_message(mine.group, calls)
    return CollectiveMismatch(mine.group, mine.position, calls)


def _lengths_differ(records: Mapping[int, FailureRecord]) -> bool:
    """Whether a rank (in the group) sends another number of elements than its peer expects."""
    return any(
        receiver_record.expects[sender] != sender_record.sends[receiver]
        for receiver, receiver_record in records.items()
        for sender, sender_record in records.items()
    )


def _meet(mine: FailureRecord, other: FailureRecord) -> bool:
    """Whether two sends or receives are the two ends of one message (or the same end)."""
    if other.rank == mine.rank:
        return True
    ends = mine.call.split(" ", 1)[0] != other.call.split(" ", 1)[0]
    return ends and mine.missing == (other.rank,) and other.missing in ((mine.rank,), ())


def _content(record: FailureRecord) -> str:
    """Dtype, shape and tag of a message: what both ends must agree on."""
    words = record.call.split(" ", 1)[1]
    before, _, after = words.partition(" root=")
    return before + after.partition(" ")[2]
