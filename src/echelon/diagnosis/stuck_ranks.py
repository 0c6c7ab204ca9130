"""Ranks that others wait for in vain: what is known of them, and the errors that say so.

Who waits for a rank in a call raises an error when time is up. A rank that hangs after its last
call is waited for by nobody, so whoever sees the end of the job asks here: the caller of ``run``,
the agent of ``echelon run``, or the rank itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self, final

from echelon.diagnosis import stacks
from echelon.diagnosis.flight_recorder import Phase, RankStatus
from echelon.errors import CommTimeout
from echelon.process import time_limits
from echelon.process.process_status import ENDED, activity

NO_PYTHON = "it runs no code of Python"  # why a thread of this process has no stack
END = "the end of the job"  # what a stuck rank keeps the others from
_MAX_DESCRIBED = 2  # ranks that an error describes; its note has the stacks of all


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StuckRank:
    """What is known of a rank that others wait for.

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

    @classmethod
    def of(
        cls, status: RankStatus, stack: Sequence[str], activity: str = "", silence: str = ""
    ) -> Self:
        """A rank that is a process, of which the flight recorder has a record.

        Args:
            activity: where it is not ``status.doing``.
            silence: where the rank is not asked by a signal.
        """
        activity = activity or status.doing
        if not silence:
            silence = "its process did not answer"
            if status.stacks_fd is None:
                silence = "the script has its own use for SIGUSR2"
            elif "stopped" in activity:
                silence = "a process that is stopped cannot tell it"
        return cls(
            rank=status.rank,
            where=status.where,
            activity=activity,
            call=status.call,
            stack=stack,
            silence=silence,
        )

    def lines(self) -> list[str]:
        """As rows of an error."""
        return [
            f"  rank {self.rank} {self.where} {self.activity}",
            f"  its last call: {self.call or 'none'}",
            *stacks.stack_rows(self.stack, self.silence),
        ]


def explained(
    error: CommTimeout, stuck: Sequence[StuckRank], known_stacks: Mapping[int, list[str]]
) -> CommTimeout:
    """``error`` with what is known of the ranks that hold up the others.

    Args:
        stuck: at least one.
        known_stacks: of all ranks that could be asked, for the note of the error.
    """
    rows = [line for rank in stuck[:_MAX_DESCRIBED] for line in rank.lines()]
    if len(stuck) > _MAX_DESCRIBED:
        rows.append(f"  and {len(stuck) - _MAX_DESCRIBED} more ranks did not come")
    explained_error = CommTimeout(
        error.doing,
        error.missing,
        error.seconds,
        "\n".join([*([error.others] if error.others else []), *rows]),
        stuck={rank.rank: f"{rank.where} {rank.activity}" for rank in stuck},
    )
    if known_stacks:
        text = stacks.shown(known_stacks)
        explained_error.add_note(f"The Python stacks of the ranks of this host:\n{text}")
    return explained_error


class ExitStage(IntEnum):
    """How far a rank has come on its way out."""

    RUNNING = 0  # it may still communicate
    CLOSED = 1  # it has closed its world
    LEAVING = 2  # its script or function has ended
    ENDED = 3  # its process or thread has ended


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ExitSign:
    """What is seen of one rank.

    Attributes:
        stage: how far it has come on its way out.
        progress: anything that changes when it makes a call or a step.
        waits: whether it is in a call, which has a timeout of its own.
        closes: whether it closes its world now.
    """

    stage: ExitStage
    progress: Hashable = None
    waits: bool = False
    closes: bool = False


@final
class StuckRankRule:
    """Says which ranks are late to leave.

    A rank is late when another one has left, it is in no call itself, and for ``timeout_s`` no
    rank has made a call or a step, or gone further on its way out. While a rank is open, another
    one that has closed its world has left; once it is closed, another one whose script has ended.

    Args:
        timeout_s: seconds that a rank gets to follow.
        clock: in seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._seen: Mapping[int, ExitSign] = {}
        self._since_s = clock()

    def late(self, signs: Mapping[int, ExitSign]) -> list[int]:
        """The ranks that are late, given what is seen of all now."""
        now = self._clock()
        if signs != self._seen:
            self._seen, self._since_s = dict(signs), now
        idle_s = now - self._since_s
        return [rank for rank in sorted(signs) if self._is_late(rank, signs, idle_s)]

    def _is_late(self, rank: int, signs: Mapping[int, ExitSign], idle_s: float) -> bool:
        sign = signs[rank]
        if sign.stage is ExitStage.ENDED or sign.waits:
            return False
        furthest = max(
            (other.stage for r, other in signs.items() if r != rank), default=ExitStage.RUNNING
        )
        has_left = furthest >= (
            ExitStage.LEAVING if sign.stage >= ExitStage.CLOSED else ExitStage.CLOSED
        )
        return has_left and idle_s >= self._timeout_s + (
            time_limits.CLOSE_WORLD_S if sign.closes else 0.0
        )


def seconds_to_follow(statuses: Iterable[RankStatus]) -> float | None:
    """How long a rank gets to follow those that have left; None until a rank has said so.

    A rank has begun its record before it knows.
    """
    return max((status.timeout_s for status in statuses), default=0.0) or None


def sign_of(status: RankStatus) -> ExitSign:
    """What the flight recorder and the kernel say of a rank that is a process."""
    stage = ExitStage.RUNNING
    if status.ended:
        stage = ExitStage.ENDED
    elif status.script_ended:
        stage = ExitStage.LEAVING
    elif status.phase >= Phase.CLOSING:
        stage = ExitStage.CLOSED
    return ExitSign(
        stage=stage,
        progress=(status.phase, status.step, status.call, status.waits_for),
        waits=status.waits_for is not None,
        closes=status.phase is Phase.CLOSING,
    )


def error_of(stuck: Sequence[StuckRank], timeout_s: float) -> CommTimeout:
    """The error for ranks that are late, given what is known of them."""
    error = CommTimeout(END, [rank.rank for rank in stuck], timeout_s)
    return explained(error, stuck, {rank.rank: list(rank.stack) for rank in stuck if rank.stack})


def stuck_rank_error(statuses: Mapping[int, RankStatus], late: Iterable[int]) -> CommTimeout:
    """The error for processes of this host that are late.

    Args:
        statuses: of all ranks that have begun their records, by rank.
        late: ranks in the job.
    """
    ranks = list(late)
    answers = stacks.ask([statuses[rank] for rank in ranks if rank in statuses], closed=True)
    stuck = [
        _stuck(statuses[rank], answers.get(rank, [])) if rank in statuses else _before_init(rank)
        for rank in ranks
    ]
    return error_of(stuck, max(status.timeout_s for status in statuses.values()))


def _stuck(status: RankStatus, stack: list[str]) -> StuckRank:
    doing = activity(status.pid, status.native_id)
    if doing == ENDED:
        doing = "has ended only now"
    elif status.script_ended:
        doing = f"has ended its script, but {doing}"
    return StuckRank.of(status, stack, doing)


def _before_init(rank: int) -> StuckRank:
    return StuckRank(
        rank=rank,
        where="before echelon.init()",
        activity="has not ended",
        call="",
        stack=[],
        silence="it has none to tell before echelon.init()",
    )
