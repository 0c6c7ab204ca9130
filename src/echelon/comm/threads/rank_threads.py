"""Whose thread the calling thread is, so that a rank does not act for another by mistake.

A group knows its rank, and an installed library that keeps one in a global gives it to all ranks.
"""

from __future__ import annotations

import threading

from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import StateError

_of_thread = threading.local()  # .world and .rank of the rank that has begun on it


def enter(world: object, rank: int) -> None:
    """Record that the calling thread is that of a rank of a world."""
    _of_thread.world, _of_thread.rank = world, rank


def require_of_rank(world: object, call: CollectiveCall) -> None:
    """Refuse a call of a world that the thread of another rank of this world makes.

    Raises:
        StateError: it does. Other threads may be of any rank.
    """
    if getattr(_of_thread, "world", None) is not world or _of_thread.rank == call.rank:
        return
    raise StateError(
        f"rank {_of_thread.rank} calls {call} on the group of rank {call.rank}. Simulated ranks "
        "share the globals of installed modules, and one of these seems to keep the group: pass "
        "the group to each call, or set ECHELON_OWN_MODULES to the name of the module"
    )
