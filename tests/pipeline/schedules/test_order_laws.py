"""Laws of schedules whose messages have no tags: order alone says what a message is.

R1: on each pair of ranks, both list the same transfers in the same order.
R2: a use that holds both ranks until both have come, the first one or all, never closes a circle.
R3: one queue for each rank suffices, which serves what the rank has issued in its order.
"""

from collections.abc import Iterator

import pytest

from echelon.pipeline import Schedule, lower
from echelon.pipeline.schedules.dataflow import Transfer, Values, transfer_of
from echelon.pipeline.schedules.ir import TRANSFER, Action
from echelon.pipeline.schedules.passes import forwards_only
from tests.pipeline.sizes import VARIANTS, fewest, make

MICROBATCHES = (1, 2, 5, 12)


def schedules(ranks: int) -> Iterator[Schedule]:
    """All variants for so many ranks, lowered for training and for evaluation."""
    for variant in VARIANTS:
        for microbatches in MICROBATCHES:
            if microbatches < fewest(variant, ranks):
                continue
            schedule = make(variant, ranks, microbatches)
            yield lower(schedule, in_order=True)
            for num_parts in {1, (microbatches + 1) // 2, microbatches}:
                yield lower(forwards_only(schedule, num_parts), in_order=True)


Entry = tuple[Transfer | None, tuple[int, ...], int | None]


def entries(schedule: Schedule, rank: int) -> list[Entry]:
    """What a rank does: a transfer; or a computation with what it needs and what it gives."""
    values, listed = Values(schedule.num_stages, schedule.num_microbatches), list[Entry]()
    for item in schedule.orders[rank]:
        if isinstance(item, Action) and item.kind in TRANSFER:
            listed.append((transfer_of(item, schedule, values), (), None))
            continue
        for part in item.parts:
            if part.microbatch is not None:
                listed.append((None, values.needed(part), values.result(part)))
    return listed


def pair_orders(schedule: Schedule) -> dict[tuple[int, int], list[Transfer]]:
    """By rank and peer, the transfers that the rank lists."""
    found: dict[tuple[int, int], list[Transfer]] = {}
    for rank in range(schedule.num_ranks):
        for transfer, _, _ in entries(schedule, rank):
            if transfer is not None:
                peer = transfer.dst if transfer.src == rank else transfer.src
                found.setdefault((rank, peer), []).append(transfer)
    return found


def ends_if_each_transfer_holds_both(schedule: Schedule) -> bool:
    """Whether all lists end if each rank stands in a transfer until the other has come to it.

    That is R2 for every use and not only the first, and R3: a queue whose head runs only when both
    have come is never ahead of its rank.
    """
    lists = [entries(schedule, rank) for rank in range(schedule.num_ranks)]
    heads, there = [0] * len(lists), [set[int]() for _ in lists]
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, listed in enumerate(lists):
            while heads[rank] < len(listed):
                transfer, needed, result = listed[heads[rank]]
                if transfer is not None:
                    other = transfer.dst if transfer.src == rank else transfer.src
                    at = lists[other][heads[other]][0] if heads[other] < len(lists[other]) else None
                    if at != transfer or transfer.value not in there[transfer.src]:
                        break
                    there[transfer.dst].add(transfer.value)
                    heads[other] += 1
                elif not set(needed) <= there[rank]:
                    break
                elif result is not None:
                    there[rank].add(result)
                heads[rank] += 1
                has_moved = True
    return all(head == len(listed) for head, listed in zip(heads, lists, strict=True))


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_schedule_runs_where_order_alone_says_what_a_message_is(ranks: int) -> None:
    for schedule in schedules(ranks):
        orders = pair_orders(schedule)
        for (rank, peer), transfers in orders.items():
            assert transfers == orders[peer, rank], (schedule.name, rank, peer)
        assert ends_if_each_transfer_holds_both(schedule), (schedule.name, ranks)


def test_the_order_by_arrival_would_stand_still_in_its_first_uses() -> None:
    """The law is sharp: interleaved on four ranks, as it runs where messages have tags."""
    assert not ends_if_each_transfer_holds_both(lower(make("interleaved-v2", 4, 8)))
