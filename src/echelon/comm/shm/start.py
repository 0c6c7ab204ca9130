"""How the processes of one host find each other's memory."""

from __future__ import annotations

from echelon.comm.shm.area import Area
from echelon.comm.shm.group import ShmGroup
from echelon.comm.shm.rank_table import RankTable
from echelon.comm.shm.segment import Segment
from echelon.comm.start_facts import compare, encode, start_facts
from echelon.diagnosis.rank_monitor import RankMonitor, Store
from echelon.errors import StartMismatch


def create_segments(size: int) -> tuple[Segment, Segment]:
    """The board of a job and the area of its world group, to be joined by ``size`` ranks."""
    board = Segment.create(RankTable.nbytes(size), what="the board of the ranks", reserve=True)
    area = Segment.create(Area.nbytes(size), what="group 'world'", reserve=False)
    return board, area


def join(
    rank: int,
    size: int,
    tokens: tuple[str, str],
    *,
    timeout: float,
    name: str = "world",
    monitor: RankMonitor | None = None,
) -> ShmGroup:
    """Enter the job whose segments have ``tokens``; returns when all ranks have.

    Args:
        monitor: of this rank; None: it knows of no others.

    Raises:
        CommTimeout: some rank did not come.
        StartMismatch: the ranks were started differently; on all of them.
        WorldError: the memory cannot be reached from this process.
    """
    segments = Segment.open(tokens[0]), Segment.open(tokens[1])
    return _enter(rank, size, segments, timeout, name, monitor)


def connect(
    rank: int,
    size: int,
    store: Store,
    *,
    timeout: float,
    name: str = "world",
    monitor: RankMonitor | None = None,
) -> ShmGroup:
    """Meet the other ranks of this host through ``store``; returns when all have come.

    Args:
        name: of the group; different jobs on one store need different names.
        monitor: of this rank; None: it knows of no others.

    Raises:
        CommTimeout: some rank did not come.
        StartMismatch: the ranks were started differently; on all of them.
        WorldError: the ranks cannot reach each other's memory.
    """
    key = f"echelon/{name}/segments"
    if rank == 0:
        segments = create_segments(size)
        store.set(key, " ".join(segment.token for segment in segments))
        try:
            return _enter(rank, size, segments, timeout, name, monitor)
        finally:
            for segment in segments:
                segment.unpublish()
    board, area = store.get(key).decode().split()
    return join(rank, size, (board, area), timeout=timeout, name=name, monitor=monitor)


def _enter(
    rank: int,
    size: int,
    segments: tuple[Segment, Segment],
    timeout: float,
    name: str,
    monitor: RankMonitor | None,
) -> ShmGroup:
    board = RankTable(
        segments[0], rank, size, RankMonitor.alone(rank) if monitor is None else monitor
    )
    board.join(encode(start_facts(timeout=timeout)), timeout)
    try:
        compare(board.notes())
    except StartMismatch as error:
        board.leave(str(error))
        raise
    area = Area(segments[1], board, rank, range(size), name)
    group = ShmGroup(area, timeout, on_close=lambda: board.leave(None))
    return group
