"""The last known state of a simulated rank, for reports about one that does not come."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import final

from echelon.diagnosis import stacks
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.diagnosis.stuck_ranks import StuckRank
from echelon.process.process_status import activity


@final
@dataclass(slots=True)
class LastSeen:
    """The last known state of a rank.

    Attributes:
        thread: the identifier of its thread; 0 before it runs.
        native_id: the identifier of this thread in the kernel.
        step: the number of optimizer steps that the rank has made.
        call: the last call of the rank.
    """

    thread: int = 0
    native_id: int = 0
    step: int = 0
    call: CollectiveCall | None = None

    def note_step(self, number: int) -> None:
        """Record how many optimizer steps the rank has made."""
        self.step = number

    def is_alive(self) -> bool:
        """Whether the thread runs. Python gives the identifier of one that has ended to others."""
        return any(thread.native_id == self.native_id for thread in threading.enumerate())

    def stack(self) -> list[str]:
        """The lines of the stack of the rank, with the innermost one last."""
        return stacks.of_this_process(self.thread) if self.is_alive() else []

    def describe(self, rank: int) -> StuckRank:
        """Describe a rank that does not wait."""
        return StuckRank(
            rank=rank,
            where=f"at step {self.step}",
            activity=activity(os.getpid(), self.native_id),
            call="" if self.call is None else str(self.call),
            stack=self.stack(),
            silence="its thread has ended",
        )
