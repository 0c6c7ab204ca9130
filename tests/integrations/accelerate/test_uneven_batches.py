"""Which loaders give some ranks more batches than others."""

import itertools

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from echelon.integrations.accelerate.uneven_batches import are_batches_uneven


def counts_and_answers(
    num_rows: int, batch_size: int, num_ranks: int, *, split: bool, even: bool, drop: bool
) -> tuple[set[int], set[bool]]:
    """How many batches the ranks get, and what they say about that."""
    dataset = TensorDataset(torch.zeros(num_rows, 1))
    batches = BatchSampler(RandomSampler(dataset), batch_size, drop)
    shards = [
        BatchSamplerShard(batches, num_ranks, rank, split_batches=split, even_batches=even)
        for rank in range(num_ranks)
    ]
    loaders = [DataLoader(dataset, batch_sampler=shard) for shard in shards]
    return {len(list(shard)) for shard in shards}, {are_batches_uneven(each) for each in loaders}


def test_the_answer_is_that_of_counting_on_every_rank() -> None:
    num_uneven = 0
    for num_rows, batch_size, num_ranks in itertools.product(range(1, 14), (1, 2, 6), (1, 2, 3)):
        for split, even, drop in itertools.product((False, True), repeat=3):
            if split and batch_size % num_ranks:
                continue
            counts, answers = counts_and_answers(
                num_rows, batch_size, num_ranks, split=split, even=even, drop=drop
            )
            assert answers == {len(counts) > 1}
            num_uneven += len(counts) > 1
    assert num_uneven > 30


def test_loaders_that_skip_batches_are_seen_through_and_others_count_as_even() -> None:
    dataset = TensorDataset(torch.zeros(5, 1))
    batches = BatchSampler(RandomSampler(dataset), 1, drop_last=False)
    shard = BatchSamplerShard(batches, 2, 0, even_batches=False)
    assert are_batches_uneven(DataLoader(dataset, batch_sampler=SkipBatchSampler(shard, 1)))
    assert not are_batches_uneven(DataLoader(dataset, batch_size=2))
    assert not are_batches_uneven(None)
