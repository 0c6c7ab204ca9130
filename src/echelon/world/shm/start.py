"""How the processes of one host find each other's memory."""

from __future__ import annotations

from typing import Protocol

from echelon.errors import StartMismatch
from echelon.world.facts import compare, encode, start_facts
from echelon.world.shm.area import Area
from echelon.world.shm.board import Board
from echelon.world.shm.group import ShmGroup
from echelon.world.shm.segment import Segment

__all__ = ["Store", "connect", "create_segments", "join"]


class Store(Protocol):
    """Where ranks leave notes for each other; every store of ``torch.distributed`` is one."""

    def set(self, key: str, value: str) -> None:
        """Leave a note."""

    def get(self, key: str) -> bytes:
        """Read a note; waits until it is there."""


def create_segments(size: int) -> tuple[Segment, Segment]:
    """The board of a job and the area of its world group, to be joined by ``size`` ranks."""
    board = Segment.create(Board.nbytes(size), what="the board of the ranks", reserve=True)
    area = Segment.create(Area.nbytes(size), what="group 'world'", reserve=False)
    return board, area


def join(
    rank: int, size: int, tokens: tuple[str, str], *, timeout: float, name: str = "world"
) -> ShmGroup:
    """Enter the job whose segments have ``tokens``; returns when all ranks have.

    Raises:
        CommTimeout: some rank did not come.
        StartMismatch: the ranks were started differently; on all of them.
        WorldError: the memory cannot be reached from this process.
    """
    return _enter(rank, size, Segment.open(tokens[0]), Segment.open(tokens[1]), timeout, name)


def connect(rank: int, size: int, store: Store, *, timeout: float, name: str = "world") -> ShmGroup:
    """Meet the other ranks of this host through ``store``; returns when all have come.

    Args:
        name: of the group; different jobs on one store need different names.

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
            return _enter(rank, size, *segments, timeout, name)
        finally:
            for segment in segments:
                segment.unpublish()
    board, area = store.get(key).decode().split()
    return join(rank, size, (board, area), timeout=timeout, name=name)


def _enter(
    rank: int, size: int, board_segment: Segment, area_segment: Segment, timeout: float, name: str
) -> ShmGroup:
    board = Board(board_segment, rank, size)
    board.join(encode(start_facts(timeout=timeout)), timeout)
    try:
        compare(board.notes())
    except StartMismatch as error:
        board.leave(str(error))
        raise
    area = Area(area_segment, board, rank, range(size), name)
    group = ShmGroup(area, timeout, on_close=lambda: board.leave(None))
    return group
