"""Streams of Hugging Face: no sample is lost or repeated on other ranks, with shuffling or not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, IterableDataset, interleave_datasets

import echelon as ec
from echelon.comm.world import World

NUM_SAMPLES, BATCH = 23, 6


def plain() -> IterableDataset:
    return Dataset.from_dict({"x": range(NUM_SAMPLES)}).to_iterable_dataset(num_shards=4)


def mapped() -> IterableDataset:
    return plain().map(lambda row: {"y": row["x"] ** 2}).filter(lambda row: row["x"] % 5 != 0)


def shuffled() -> IterableDataset:
    return plain().shuffle(seed=3, buffer_size=7)


def shuffled_then_mapped() -> IterableDataset:
    return shuffled().map(lambda row: {"y": -row["x"]})


def shuffled_shards() -> IterableDataset:
    return plain().shuffle(seed=3, buffer_size=1)


def interleaved() -> IterableDataset:
    return interleave_datasets([plain(), mapped()], probabilities=[0.5, 0.5], seed=1)


STREAMS: list[Callable[[], IterableDataset]] = [
    plain,
    mapped,
    shuffled,
    shuffled_then_mapped,
    shuffled_shards,
    interleaved,
]


def stream_of(make: Callable[[], IterableDataset], rank: int = 0, size: int = 1) -> ec.SampleStream:
    return ec.SampleStream(make(), BATCH, (rank, size), collate=list)


def epoch_of(make: Callable[[], IterableDataset], epoch: int) -> list[Any]:
    """An epoch as the library itself gives it."""
    stream = make()
    stream.set_epoch(epoch)
    return list(stream)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.utils.logging.set_verbosity(logging.ERROR)


@pytest.mark.parametrize("make", STREAMS)
@pytest.mark.parametrize("stop", range(6))
def test_a_stop_anywhere_loses_and_repeats_nothing(
    make: Callable[[], IterableDataset], stop: int, tmp_path: Path
) -> None:
    whole = list(stream_of(make).batches(2))
    first = stream_of(make)
    seen = list(islice(first.batches(2), stop))
    ec.save(tmp_path, step=1, stream=first)
    later = [stream_of(make, rank, 3) for rank in range(3)]
    for part in later:
        ec.load(tmp_path, stream=part)
    for parts in zip(*(part.batches(2 - part.epoch) for part in later), strict=True):
        seen.append([sample for part in parts for sample in part or ()])
    assert seen == whole
    assert [sample for batch in whole for sample in batch] == epoch_of(make, 0) + epoch_of(make, 1)


def test_epochs_are_shuffled_anew_and_complete() -> None:
    batches = list(stream_of(shuffled).batches(2))
    numbers = [sample["x"] for batch in batches for sample in batch]
    first, second = numbers[:NUM_SAMPLES], numbers[NUM_SAMPLES:]
    assert sorted(first) == sorted(second) == list(range(NUM_SAMPLES))
    assert first != second


def trains(world: World, folder: str, steps: int) -> list[list[int]]:
    stream = ec.SampleStream(mapped(), BATCH, world.group, transform=lambda row: row["x"])
    start = ec.load(folder, stream=stream, group=world.group).step if ec.steps(folder) else 0
    seen: list[list[int]] = []
    for step, batch in enumerate(stream.batches(None), start + 1):
        seen.append(ec.gather_samples(batch, stream).tolist())
        if step == steps:
            ec.save(folder, step=step, stream=stream, group=world.group)
            break
    return seen


def test_ranks_that_are_processes_continue_each_others_stream(tmp_path: Path) -> None:
    seen: list[Any] = []
    for ranks, steps in ((2, 2), (3, 5)):
        results = ec.run(trains, ranks, "processes", args=(str(tmp_path), steps))
        assert all(result == results[0] for result in results)
        seen += results[0]
    numbers = [x for x in range(NUM_SAMPLES) if x % 5]
    batches = [numbers[i : i + BATCH] for i in range(0, len(numbers), BATCH)]
    assert seen == [*batches, *batches][:5]


def test_the_part_that_is_read_again_is_what_a_state_cannot_hold() -> None:
    """A stream without a shuffle buffer continues from its state, and one with a buffer counts."""
    for make, has_state in ((mapped, True), (shuffled_then_mapped, False)):
        stream = stream_of(make)
        next(stream.batches())
        assert (stream.state_dict()["source"] is not None) == has_state
