"""The shared memory of a group as its ranks see it, but with all ranks in one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from echelon.comm.shm.area import Area
from echelon.comm.shm.rank_table import RankTable
from echelon.comm.shm.start import create_segments
from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall
from echelon.diagnosis.rank_monitor import RankMonitor

T = TypeVar("T")


def areas(size: int, timeout: float = 20.0) -> list[Area]:
    """One group of ``size`` ranks, as each of them sees it."""
    table, memory = create_segments(size)
    return [
        Area(
            memory,
            RankTable(table, rank, size, RankMonitor.alone(rank)),
            rank,
            range(size),
            "g",
            timeout,
        )
        for rank in range(size)
    ]


def call(op: str, position: int = 0, *, blocking: bool = True) -> CollectiveCall:
    """A call at a line of no file."""
    return CollectiveCall(CallSignature(op), CallSite("a.py", 1, "f"), position, "g", 0, blocking)


def on_all_ranks(step: Callable[[int], T], size: int) -> list[T]:
    """The results of ``step(rank)``, which runs on a thread for each rank."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(step, range(size)))
