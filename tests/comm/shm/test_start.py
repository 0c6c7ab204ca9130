"""Ranks of one host find each other's memory through a store, and compare how they were started."""

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from echelon.comm.shm.segment import Segment
from echelon.comm.shm.start import connect
from echelon.errors import CommTimeout, StartMismatch, WorldError
from tests.comm.shm.areas import on_all_ranks


def test_ranks_meet_through_a_store_and_nobody_joins_them_later() -> None:
    store = c10d.HashStore()

    def main(rank: int) -> list[float]:
        group = connect(rank, 3, store, timeout=20.0, name="job")
        total = torch.tensor([rank + 1.0])
        group.all_reduce(total)
        group.close()
        return total.tolist()

    assert on_all_ranks(main, 3) == [[6.0]] * 3
    for token in store.get("echelon/job/segments").decode().split():
        with pytest.raises(WorldError, match="cannot open the shared memory"):
            Segment.open(token)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(CommTimeout, match="rank 0, starting a world of 3 ranks,") as info:
        connect(0, 3, c10d.HashStore(), timeout=0.1)
    assert info.value.missing == (1, 2)


def test_ranks_that_were_started_differently_all_raise_what_differs() -> None:
    store = c10d.HashStore()

    def main(rank: int) -> tuple[str, dict[int, str]]:
        with pytest.raises(StartMismatch) as info:
            connect(rank, 3, store, timeout=20.0 + (rank == 1))
        return info.value.field, info.value.found

    expected = ("option timeout", {0: "20.0", 1: "21.0", 2: "20.0"})
    assert on_all_ranks(main, 3) == [expected] * 3
