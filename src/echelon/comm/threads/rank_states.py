"""What each simulated rank does while a debugger has stopped them."""

from __future__ import annotations

from dataclasses import dataclass
from types import FrameType
from typing import final

from echelon.comm.threads.thread_world import ThreadWorld
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors.message_text import line_of, ranks_text
from echelon.process.thread_frames import current_frames


@final
@dataclass(frozen=True)
class RankState:
    """Where a rank is.

    Attributes:
        rank: in the job.
        frame: its innermost frame; None if its thread runs no code.
        doing: what it waits for, or why it does not run.
    """

    rank: int
    frame: FrameType | None
    doing: str


def rank_states(thread_world: ThreadWorld) -> list[RankState]:
    """The states of all ranks now, of which that of the caller is not known to be stopped."""
    frames = current_frames()
    states = []
    with thread_world.lock:
        for rank, sighting in enumerate(thread_world.sightings):
            runs = sighting.is_alive() and not thread_world.has_finished(rank)
            frame = frames.get(sighting.thread) if runs else None
            states.append(RankState(rank, frame, _doing(thread_world, rank, frame)))
    return states


def _doing(thread_world: ThreadWorld, rank: int, frame: FrameType | None) -> str:
    if not thread_world.sightings[rank].thread:
        return "has not started"
    if thread_world.has_finished(rank):
        return "has returned"
    if frame is None:
        return _end_text(thread_world, rank)
    waits = [_wait_text(call, absent) for call, absent in thread_world.waits_of(rank)]
    if waits:
        return ", and ".join(waits)
    is_next = thread_world.order.is_next(rank)
    return "waits for its turn" if is_next else "runs, or blocks outside of groups"


def _end_text(thread_world: ThreadWorld, rank: int) -> str:
    """Why a rank has ended that has not returned."""
    failed, error = thread_world.failure or (rank, None)
    if failed != rank:
        return f"has ended, because rank {failed} failed"
    return "has ended" if error is None else f"has raised {line_of(error)}"


def _wait_text(call: CollectiveCall, absent: list[int]) -> str:
    place = f"{call.signature} (#{call.position} of group {call.group!r})"
    return f"waits in {place} for {ranks_text(absent)}"
