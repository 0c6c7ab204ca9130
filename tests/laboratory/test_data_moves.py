"""Which bytes of which rank come to which other, for every kind of call."""

from __future__ import annotations

import torch

from echelon.comm.derived import Barrier, Reduce
from echelon.comm.primitives import (
    AllGather,
    AllReduce,
    Broadcast,
    Exchange,
    Receive,
    ReduceScatter,
    Send,
)
from echelon.laboratory.data_moves import DataMove, moves_of, tensors_of

RANKS = (4, 7)


def bytes_of(numel: int) -> torch.Tensor:
    """A tensor of so many bytes."""
    return torch.zeros(numel, dtype=torch.uint8)


def test_a_reduction_takes_the_values_of_all_to_all() -> None:
    operations = [AllReduce(bytes_of(3), "sum") for _ in RANKS]
    assert moves_of(RANKS, operations) == [(4, 7, 3), (7, 4, 3)]
    assert tensors_of(operations[0]) == ([operations[0].tensor],) * 2


def test_a_reduction_to_one_rank_goes_to_it_alone() -> None:
    assert moves_of(RANKS, [Reduce(bytes_of(3), 1, "sum") for _ in RANKS]) == [DataMove(4, 7, 3)]


def test_a_broadcast_comes_from_its_source() -> None:
    assert moves_of(RANKS, [Broadcast(bytes_of(3), 1) for _ in RANKS]) == [(7, 4, 3)]


def test_a_reduce_scatter_sends_each_rank_its_part() -> None:
    operations = [ReduceScatter(bytes_of(1 + r), bytes_of(3), [1, 2], "sum") for r in range(2)]
    assert moves_of(RANKS, operations) == [(4, 7, 2), (7, 4, 1)]
    tensors = tensors_of(operations[0])
    assert tensors is not None
    assert [part.numel() for part in tensors.inputs] == [1, 2]
    assert not tensors.in_place


def test_a_gather_of_all_sends_what_each_has() -> None:
    outputs = [bytes_of(1), bytes_of(2)]
    operations = [AllGather(outputs, bytes_of(1 + r)) for r in range(2)]
    assert moves_of(RANKS, operations) == [(4, 7, 1), (7, 4, 2)]


def test_an_exchange_sends_what_is_for_the_other_and_nothing_else() -> None:
    operations = [
        Exchange([bytes_of(1), bytes_of(0)], [bytes_of(1), bytes_of(5)], False),
        Exchange([bytes_of(5), bytes_of(2)], [bytes_of(0), bytes_of(2)], False),
    ]
    assert moves_of(RANKS, operations) == [(4, 7, 5)]


def test_a_message_goes_from_the_sender_to_the_receiver() -> None:
    operations = [Send(bytes_of(3), 1, 0), Receive(bytes_of(3), 0, 0)]
    assert moves_of(RANKS, operations) == [(4, 7, 3)]


def test_a_barrier_moves_nothing() -> None:
    barrier = Barrier(torch.device("cpu"))
    assert moves_of(RANKS, [barrier, barrier]) == []
    assert tensors_of(barrier) is None
