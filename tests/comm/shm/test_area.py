"""Ranks meet in rounds: what one rank writes before a round, all ranks read after it."""

from itertools import pairwise

import pytest
import torch

from echelon.comm.shm.area import Area
from echelon.errors import CollectiveMismatch, CommTimeout
from tests.comm.shm.areas import areas, call, on_all_ranks


def write(area: Area, number: int) -> list[torch.Tensor]:
    """Write the slot of this rank for the next round, and return the slots of all ranks."""
    slots = area.slots(torch.int64, 2)
    slots[area.rank].copy_(torch.tensor([area.rank, number]))
    return slots


def test_a_rank_reads_the_half_of_the_round_while_others_write_the_next_one() -> None:
    members = areas(3)
    for number in range(4):
        slots = [write(area, number) for area in members]
        on_all_ranks(lambda rank: members[rank].next_round(call("barrier")), 3)
        later = write(members[2], number + 1)  # rank 2 goes on before the others have read
        assert later[2].data_ptr() != slots[2][2].data_ptr()
        for of_rank in slots:
            assert [slot.tolist() for slot in of_rank] == [[rank, number] for rank in range(3)]


def test_rounds_go_on_after_the_largest_number_of_a_word() -> None:
    members = areas(2)
    for area in members:
        area.round = 0xFFFFFFFE
        area.words[area.rank * 1024] = area.round
    for expected in (0xFFFFFFFF, 0, 1):
        on_all_ranks(lambda rank: members[rank].next_round(call("barrier")), 2)
        assert [area.round for area in members] == [expected] * 2
        assert members[0].absent() == members[1].absent() == []


def test_a_rank_that_does_not_post_a_round_is_absent_and_named() -> None:
    area = areas(3, timeout=0.05)[1]
    with pytest.raises(CommTimeout, match="barrier") as info:
        area.next_round(call("barrier"))
    assert area.absent() == [0, 2]
    assert info.value.missing == (0, 2)


def test_ranks_that_agree_on_a_call_read_the_keys_and_addresses_of_all() -> None:
    members = areas(3)
    for position in range(5):  # the notes of a page are used again

        def agree(rank: int, number: int = position) -> tuple[list[int], list[int]]:
            area, reduction = members[rank], call("all_reduce", number)
            area.agree(reduction, key=rank + number, address=10 * rank)
            return area.keys(reduction), area.addresses(reduction)

        expected = ([position, position + 1, position + 2], [0, 10, 20])
        assert on_all_ranks(agree, 3) == [expected] * 3


def test_ranks_that_do_not_agree_raise_one_error_with_the_calls_of_all() -> None:
    members = areas(2)

    def agree(rank: int) -> str:
        with pytest.raises(CollectiveMismatch) as info:
            members[rank].agree(call(("all_reduce", "barrier")[rank]))
        return str(info.value)

    first, second = on_all_ranks(agree, 2)
    assert first == second
    assert "rank 0: all_reduce at a.py:1 in f" in first
    assert "rank 1: barrier at a.py:1 in f" in first


def test_rings_and_slots_of_all_ranks_lie_apart_within_the_segment() -> None:
    area = areas(3)[0]
    starts = sorted(area.ring_start(src, dst) for src in range(3) for dst in range(3))
    stride = starts[1] - starts[0]
    assert starts == list(range(starts[0], starts[0] + 9 * stride, stride))
    assert starts[-1] + stride == Area.nbytes(3)
    last = area.slots(torch.uint8, 1 << 16)[2]
    ends = [last.data_ptr() + last.numel() - area.segment.tensor(0, 1).data_ptr()]
    area.round += 1
    last = area.slots(torch.uint8, 1 << 16)[2]
    ends.append(last.data_ptr() + last.numel() - area.segment.tensor(0, 1).data_ptr())
    assert max(ends) == starts[0]


def test_no_two_ranks_write_to_one_cache_line() -> None:
    area = areas(3)[0]
    for dtype in (torch.float32, torch.uint8):
        chunks = area.chunks(1000, dtype)
        assert (chunks[0][0], chunks[-1][1]) == (0, 1000)
        assert all(first[1] == second[0] for first, second in pairwise(chunks))
        assert all(stop * dtype.itemsize % 64 == 0 for _, stop in chunks[:-1])
