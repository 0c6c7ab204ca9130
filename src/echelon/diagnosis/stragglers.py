"""Ranks that do not follow those that have left: when they are late, and what is told of them.

Who waits for a rank in a call raises an error when time is up. A rank that hangs after its last
call is waited for by nobody, so whoever sees the end of the job asks here: the caller of ``run``,
the agent of ``echelon run``, or the rank itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import final

from echelon.diagnosis import stacks
from echelon.diagnosis.flight_recorder import Phase, RankStatus
from echelon.diagnosis.hang import SilentRank, explained, finding_of
from echelon.errors import CommTimeout
from echelon.process.process_status import activity

END = "the end of the job"  # what a straggler keeps the others from
_CLOSE_S = 10.0  # how much longer closing a world may take; it waits for others itself


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
class StragglerRule:
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
        return has_left and idle_s >= self._timeout_s + (_CLOSE_S if sign.closes else 0.0)


def sign_of(entry: RankStatus) -> ExitSign:
    """What the logbook and the kernel say of a rank that is a process."""
    stage = ExitStage.RUNNING
    if entry.ended:
        stage = ExitStage.ENDED
    elif entry.script_ended:
        stage = ExitStage.LEAVING
    elif entry.phase >= Phase.CLOSING:
        stage = ExitStage.CLOSED
    return ExitSign(
        stage=stage,
        progress=(entry.phase, entry.step, entry.call, entry.awaited),
        waits=entry.awaited is not None,
        closes=entry.phase is Phase.CLOSING,
    )


def error_of(findings: Iterable[SilentRank], timeout_s: float) -> CommTimeout:
    """The error for ranks that are late, given what was found out about them."""
    found = list(findings)
    error = CommTimeout(END, [finding.rank for finding in found], timeout_s)
    told = {finding.rank: list(finding.stack) for finding in found if finding.stack}
    return explained(error, found, told)


def straggler_error(entries: Mapping[int, RankStatus], late: Iterable[int]) -> CommTimeout:
    """The error for processes of this host that are late.

    Args:
        entries: of all ranks that have begun their pages, by rank.
        late: ranks in the job.
    """
    ranks = list(late)
    told = stacks.ask([entries[rank] for rank in ranks if rank in entries], closed=True)
    findings = [
        _finding(entries[rank], told.get(rank, [])) if rank in entries else _absent(rank)
        for rank in ranks
    ]
    return error_of(findings, max(entry.timeout_s for entry in entries.values()))


def _finding(entry: RankStatus, stack: list[str]) -> SilentRank:
    doing = activity(entry.pid, entry.native)
    if entry.script_ended:
        doing = f"has ended its script, but {doing}"
    return finding_of(entry, doing, stack)


def _absent(rank: int) -> SilentRank:
    return SilentRank(
        rank=rank,
        where="before echelon.init()",
        activity="has not ended",
        call="",
        stack=[],
        silence="it has none to tell before echelon.init()",
    )
