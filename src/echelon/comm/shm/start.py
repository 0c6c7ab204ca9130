"""The start of a world of processes: the ranks find each other's memory and compare facts."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.comm.shm.area import Area
from echelon.comm.shm.group import ShmGroup
from echelon.comm.shm.rank_table import RankTable
from echelon.comm.shm.segment import Segment
from echelon.comm.start_facts import compare, encode, start_facts
from echelon.diagnosis.rank_monitor import RankMonitor, Store
from echelon.errors import SharedMemoryError, StartMismatch


def create_segments(size: int) -> tuple[Segment, Segment]:
    """Make the segments of the rank table and of the group ``"world"``, for ``size`` ranks."""
    table = Segment.create(RankTable.nbytes(size), what="the table of the ranks", reserve=True)
    try:
        area = Segment.create(Area.nbytes(size), what="group 'world'", reserve=False)
    except SharedMemoryError:
        table.unpublish()
        raise
    return table, area


def connect(
    rank: int,
    size: int,
    store: Store,
    *,
    timeout: float,
    name: str = "world",
    monitor: RankMonitor | None = None,
    job_ranks: Sequence[int] | None = None,
) -> ShmGroup:
    """Join the other ranks of this host through ``store``, and return when all have joined.

    Different jobs on one store need different names. ``job_ranks`` are the members of a group of
    some ranks, by their numbers in the job; errors name them so.
    """
    key = f"echelon/{name}/segments"
    segments: Sequence[Segment]
    if rank == 0:
        segments = create_segments(size)
        store.set(key, " ".join(segment.token for segment in segments))
    else:
        segments = [Segment.open(token) for token in store.get(key).decode().split()]
    try:
        return join(
            rank, size, segments, timeout=timeout, name=name, monitor=monitor, job_ranks=job_ranks
        )
    finally:
        for segment in segments:
            segment.unpublish()


def join(
    rank: int,
    size: int,
    segments: Sequence[Segment],
    *,
    timeout: float,
    name: str = "world",
    monitor: RankMonitor | None = None,
    job_ranks: Sequence[int] | None = None,
) -> ShmGroup:
    """Join the job that has these segments, and return when all ranks have joined.

    Without a ``monitor``, this rank records nothing about itself for the others.
    """
    if monitor is None:
        monitor = RankMonitor.alone(rank if job_ranks is None else job_ranks[rank])
    table = RankTable(segments[0], rank, size, monitor, job_ranks)
    table.join(encode(start_facts(timeout=timeout)), timeout)
    try:
        compare(table.notes())
    except StartMismatch as error:
        table.leave(str(error))
        raise
    area = Area(segments[1], table, rank, range(size), name, timeout)
    return ShmGroup(area, on_close=lambda: table.leave(None))
