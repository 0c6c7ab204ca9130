"""Which simulated rank the calling thread is, so that no rank acts for another by mistake.

A group knows its rank, and an installed library that keeps one in a global gives it to all ranks.
``process.this_rank`` has what the thread finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from echelon.comm.threads.process_state import StateOwner
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import StateError
from echelon.process.this_rank import here


@final
@dataclass(frozen=True, slots=True)
class RankThread:
    """A simulated rank, as its thread finds it.

    Attributes:
        rank: in the job.
        order: of the ranks of its world, by which worlds are told apart.
        state: what it has for itself of the process.
        resume: waits for its turn, if it was overtaken.
    """

    rank: int
    order: object
    state: StateOwner
    resume: Callable[[], None]


def this_rank() -> RankThread | None:
    """The rank that the calling thread is; None for a thread that is no simulated rank."""
    rank: RankThread | None = here.rank
    return rank


def resume_if_overtaken() -> None:
    """Wait for the turn of the rank on the calling thread, if it was overtaken."""
    rank: RankThread | None = here.rank
    if rank is not None:
        rank.resume()


def require_of_rank(order: object, call: CollectiveCall) -> None:
    """Refuse a call of a world that the thread of another rank of this world makes.

    Args:
        order: of the ranks of the world.

    Raises:
        StateError: it does. Other threads may be of any rank.
    """
    rank: RankThread | None = here.rank  # without a call: each call asks
    if rank is None or rank.order is not order or rank.rank == call.rank:
        return
    raise StateError(
        f"rank {rank.rank} calls {call} on the group of rank {call.rank}. Simulated ranks "
        "share the globals of installed modules, and one of these seems to keep the group: pass "
        "the group to each call, or set ECHELON_OWN_MODULES to the name of the module"
    )
