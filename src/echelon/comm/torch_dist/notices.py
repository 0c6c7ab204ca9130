"""What a rank writes into the store when it stops, and what the others conclude from it. Pure.

A rank learns of trouble as a closed connection or as time that is up: it knows its neighbour at
most. So every rank that stops leaves one notice, and a rank in trouble reads those of the group and
follows them to the first cause: rank 2 lost rank 1, rank 1 lost rank 0, rank 0 raised an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CollectiveMismatch, CommError, CommTimeout, RankFailed
from echelon.errors.printable import printable


class Reason(Enum):
    """Why a rank stopped."""

    RAISED = "an exception of the user's code or of this library ended it"
    LEFT = "it closed its world"
    TIMEOUT = "it waited in vain"
    LOST = "a connection closed under it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Why one rank stopped.

    Attributes:
        rank: in the job.
        reason: kind of end.
        text: the exception, for ``RAISED``.
        group: group of the call it was in; empty if in none.
        position: of that call in the group.
        call: what the ranks must agree on.
        place: line of user code.
        p2p: whether it was a send or a receive, which have positions of their own.
        sends: elements for each rank of the group, where ranks may differ in them.
        expects: elements from each rank of the group, likewise.
        missing: ranks in the job that it waited for or lost.
        seconds: how long it waited.
        root: the rank that it blames; -1 if not known.
        cause: what it says of that rank.
    """

    rank: int
    reason: Reason
    text: str = ""
    group: str = ""
    position: int = -1
    call: str = ""
    place: str = ""
    p2p: bool = False
    sends: tuple[int, ...] = ()
    expects: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    seconds: float = 0.0
    root: int = -1
    cause: str = ""

    @classmethod
    def of(
        cls,
        ticket: CollectiveCall,
        *,
        late: bool,
        missing: Sequence[int],
        seconds: float,
        sends: Sequence[int] = (),
        expects: Sequence[int] = (),
    ) -> Notice:
        """The notice of a rank that waited in vain (``late``) or lost a peer in this call."""
        return cls(
            rank=ticket.rank,
            reason=Reason.TIMEOUT if late else Reason.LOST,
            group=ticket.group,
            position=ticket.position,
            call=str(ticket.signature),
            place=str(ticket.place),
            p2p=ticket.signature.op in ("send", "recv"),
            sends=tuple(sends),
            expects=tuple(expects),
            missing=tuple(missing),
            seconds=seconds,
        )

    def text_of_call(self) -> str:
        """The call with all that ranks may disagree on, and its place."""
        lengths = f", sends {list(self.sends)}, expects {list(self.expects)} elements"
        return f"{self.call}{lengths if self.sends else ''} at {self.place}"

    def dump(self) -> str:
        """As text for the store."""
        return json.dumps({**asdict(self), "reason": self.reason.name})

    @classmethod
    def load(cls, text: bytes, rank: int) -> Notice | None:
        """The notice of ``rank`` from the text of ``dump``; None where it is none of that rank.

        In a store that asks nobody who they are, anybody may have written it: it tells something
        only if each fact is of its kind, and nothing in it is for a terminal to obey.
        """
        try:
            facts = json.loads(text)
            reason = Reason[facts.pop("reason")]
            numbers = {name: tuple(map(int, facts.pop(name))) for name in _NUMBERS}
            texts = {name: printable(str(facts.pop(name))) for name in _TEXTS}
            notice = cls(
                rank=int(facts.pop("rank")),
                reason=reason,
                position=int(facts.pop("position")),
                p2p=bool(facts.pop("p2p")),
                seconds=float(facts.pop("seconds")),
                root=int(facts.pop("root")),
                **numbers,  # type: ignore[arg-type]
                **texts,  # type: ignore[arg-type]
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return notice if notice.rank == rank else None


_NUMBERS = ("sends", "expects", "missing")
_TEXTS = ("text", "group", "call", "place", "cause")


def conclude(
    mine: Notice,
    seen: Mapping[int, Notice],
    ranks: tuple[int, ...],
    *,
    blind: bool = False,
    alive: Sequence[int] = (),
    seconds: float = 0.0,
) -> tuple[CommError, bool]:
    """What this rank raises, given the notices of others, and whether that is final.

    Args:
        mine: what happened here: ``TIMEOUT`` or ``LOST``.
        seen: notices of other ranks, by rank in the job.
        ranks: the group's ranks in the job, in order.
        blind: the store is gone, so a rank without a notice may have written one.
        alive: ranks in the job whose processes are known to live.
        seconds: for how long notices have been looked for.
    """
    mismatch = _mismatch(mine, seen, ranks)
    if mismatch is not None:
        return mismatch, True
    doing = f"{mine.call} (#{mine.position} of group {mine.group!r}) at {mine.place}"
    # An engine that does not say whom it lost: whoever wrote no notice has not stopped by himself.
    missing = mine.missing or tuple(rank for rank in ranks if rank != mine.rank)
    known = [seen[rank] for rank in missing if rank in seen]
    silent = tuple(rank for rank in missing if rank not in seen)
    ended = [notice for notice in known if notice.reason in (Reason.RAISED, Reason.LEFT)]
    for notice in ended or (known if mine.missing and mine.reason is Reason.LOST else ()):
        root, cause = _blame(notice, mine.rank)
        return RankFailed(root, cause, doing), notice.reason is not Reason.TIMEOUT
    if mine.reason is Reason.LOST:
        failed = (silent or missing)[0]
        cause = "died: its connection closed without a word (killed, crashed or exited)"
        if blind:
            cause = "closed its connection; why is not known, because the store is gone, too"
        elif failed in alive:
            waited = f"but has not said why in {seconds:.1f} s"
            cause = f"closed its connection; its process lives, {waited}"
        return RankFailed(failed, cause, doing), False
    others = "\n".join(
        f"  rank {notice.rank} waits in {notice.call} of group {notice.group!r} at {notice.place}"
        for notice in known
    )
    return CommTimeout(doing, silent or missing, mine.seconds, others), False


def _mismatch(
    mine: Notice, seen: Mapping[int, Notice], ranks: tuple[int, ...]
) -> CollectiveMismatch | None:
    """Ranks of the group that stopped at the same position in different calls."""
    here = {mine.rank: mine} | {
        rank: notice
        for rank, notice in seen.items()
        if (notice.group, notice.position, notice.p2p) == (mine.group, mine.position, mine.p2p)
    }
    if mine.p2p:
        here = {rank: notice for rank, notice in here.items() if _meet(mine, notice, ranks)}
        different = any(_content(notice) != _content(mine) for notice in here.values())
    else:
        different = len({notice.call for notice in here.values()}) > 1 or disagree(
            {ranks.index(rank): notice for rank, notice in here.items() if notice.sends}
        )
    if not different:
        return None
    calls = {ranks.index(rank): notice.text_of_call() for rank, notice in here.items()}
    if mine.p2p:
        return CollectiveMismatch.of_message(mine.group, calls)
    return CollectiveMismatch(mine.group, mine.position, calls)


def disagree(notices: Mapping[int, Notice]) -> bool:
    """Whether a rank (in the group) sends another number of elements than its peer expects."""
    return any(
        mine.expects[sender] != other.sends[receiver]
        for receiver, mine in notices.items()
        for sender, other in notices.items()
    )


def _meet(mine: Notice, other: Notice, ranks: tuple[int, ...]) -> bool:
    """Whether two sends or receives are the two ends of one message (or the same end)."""
    if other.rank == mine.rank:
        return True
    ends = mine.call.split(" ", 1)[0] != other.call.split(" ", 1)[0]
    return ends and mine.missing == (other.rank,) and other.missing in ((mine.rank,), ())


def _content(notice: Notice) -> str:
    """Dtype, shape and tag of a message: what both ends must agree on."""
    words = notice.call.split(" ", 1)[1]
    before, _, after = words.partition(" root=")
    return before + after.partition(" ")[2]


def _blame(notice: Notice, me: int) -> tuple[int, str]:
    """The rank that a notice leads to, and what is wrong with it."""
    if notice.reason is Reason.RAISED:
        return notice.rank, f"raised {notice.text}"
    if notice.reason is Reason.LEFT:
        return notice.rank, "closed its world and left"
    if notice.root >= 0:
        return notice.root, notice.cause
    late = [rank for rank in notice.missing if rank != me]
    if notice.reason is Reason.TIMEOUT and not late:
        return (
            notice.rank,
            f"gave up after it had waited {notice.seconds:.1f} s for this rank in {notice.call}",
        )
    if late and notice.reason is Reason.TIMEOUT:
        return (
            late[0],
            f"did not come: rank {notice.rank} waited {notice.seconds:.1f} s for it "
            f"in {notice.call}",
        )
    return notice.rank, f"stopped in {notice.call} at {notice.place}"
