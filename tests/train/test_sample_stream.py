"""Streams: the same samples in the same order, on any number of ranks, over any stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import echelon as ec
from echelon.comm.world import World
from tests.train.test_source_cursor import SOURCES, Numbers, Seekable
from tests.worlds import KINDS, run_world

STREAMS = {"stream": Numbers, "state": Seekable}


def make(kind: str, length: int) -> Any:
    return STREAMS[kind](length)


def flat(batches: list[list[int] | None]) -> list[int]:
    return [sample for batch in batches for sample in batch or ()]


def read_all(
    kind: str, length: int, batch: int, stops: list[tuple[int, int]], drop_last: bool
) -> list[list[int]]:
    """The samples of each step of 3 epochs; a stop is a number of steps, and who takes them."""
    steps: list[list[int]] = []
    state = None
    for num_steps, size in [*stops, (10**6, 2)]:
        streams = [
            ec.SampleStream(
                make(kind, length), batch, (rank, size), drop_last=drop_last, collate=list
            )
            for rank in range(size)
        ]
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
        left = 3 - streams[0].epoch
        if left <= 0:
            break
        for i, parts in enumerate(zip(*(s.batches(left) for s in streams), strict=True)):
            steps.append(flat([*parts]))
            assert sum(stream.weight for stream in streams) == pytest.approx(size)
            if i + 1 == num_steps:
                break
        states = [stream.state_dict() for stream in streams]
        assert all(other == states[0] for other in states)
        state = states[0]
    return steps


@settings(max_examples=100)
@given(
    st.sampled_from([*STREAMS]),
    st.integers(1, 12),
    st.integers(4, 6),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=5),
    st.booleans(),
)
def test_stops_and_numbers_of_ranks_change_nothing(
    kind: str, length: int, batch: int, stops: list[tuple[int, int]], drop_last: bool
) -> None:
    if drop_last and length < batch:
        return  # refused, see below
    expected = []
    for epoch in range(3):
        samples = [100 * epoch + i for i in range(length)]
        batches = [samples[i : i + batch] for i in range(0, length, batch)]
        expected += [b for b in batches if len(b) == batch or not drop_last]
    assert read_all(kind, length, batch, stops, drop_last) == expected


def trains(world: World, folder: str, kind: str, steps: int) -> list[list[float]]:
    """Train from the newest step on; the samples that were read, and the weights."""
    model = ec.DDP(torch.nn.Linear(1, 1), world.group)
    with torch.no_grad():
        model.module.weight.fill_(0.5)
    stream = ec.SampleStream(
        make(kind, 11), 4, world.group, transform=lambda i: torch.tensor([float(i)])
    )
    parts: dict[str, Any] = {"model": model, "stream": stream}
    start = ec.load(folder, **parts).step if ec.steps(folder) else 0
    seen: list[list[float]] = []
    for step, batch in enumerate(stream.batches(epochs=None), start + 1):
        samples = ec.gather_samples(None if batch is None else batch[:, 0], stream)
        seen.append(samples.tolist())
        model(batch if batch is not None else torch.ones(1, 1)).sum().backward()
        if step == steps:
            ec.save(folder, step=step, **parts)
            return seen
    raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", STREAMS)
def test_a_job_continues_on_other_ranks(tmp_path: Path, kind: str, source: str) -> None:
    seen: list[list[float]] = []
    for ranks, steps in ((2, 2), (3, 4), (1, 7)):
        results = run_world(kind, trains, ranks, (str(tmp_path), source, steps))
        assert all(result == results[0] for result in results)
        seen += results[0]
    whole = [[float(100 * e + i) for i in range(11)] for e in range(3)]
    assert seen == [w[i : i + 4] for w in whole for i in (0, 4, 8)][:7]


def test_only_the_samples_of_this_rank_are_transformed() -> None:
    seen: list[int] = []
    stream = ec.SampleStream(range(5), 4, (1, 2), transform=lambda i: seen.append(i) or i)
    assert [None if b is None else b.tolist() for b in stream.batches()] == [[2, 3], None]
    assert seen == [2, 3]
    assert stream.epoch == 1


def test_shares_and_weight_are_those_of_the_batch() -> None:
    stream = ec.SampleStream(range(5), 3, (0, 2))
    batches = stream.batches()
    next(batches)
    assert (stream.shares, stream.weight) == ((2, 1), 4 / 3)
    next(batches)
    assert stream.shares == (1, 1)
    assert list(batches) == []
    with pytest.raises(ec.StateError, match="ask in the loop"):
        assert stream.weight


def test_a_loop_that_was_left_goes_on() -> None:
    stream = ec.SampleStream(range(6), 2, (0, 1))
    first = next(stream.batches())
    old = stream.batches()
    assert [first.tolist(), next(old).tolist()] == [[0, 1], [2, 3]]
    assert [batch.tolist() for batch in stream.batches(2)] == [[4, 5], [0, 1], [2, 3], [4, 5]]
    with pytest.raises(ec.StateError, match="was overtaken"):
        next(old)


@pytest.mark.parametrize(
    ("source", "batch", "drop_last", "message"),
    [([], 2, False, "no batch of 2 in epoch 0"), ([1], 2, True, "no batch of 2 in epoch 0")],
)
def test_an_epoch_without_a_batch_is_an_error(
    source: list[int], batch: int, drop_last: bool, message: str
) -> None:
    stream = ec.SampleStream(source, batch, (0, 1), drop_last=drop_last)
    with pytest.raises(ec.StateError, match=message):
        next(stream.batches())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ec.ArgumentError, match="a batch of 2 samples has none for some of 3 ranks"):
        ec.SampleStream(range(9), 2, (0, 3))
    stream = ec.SampleStream(range(9), 2, (0, 1))
    with pytest.raises(ec.ArgumentError, match="the state is of batches with"):
        stream.load_state_dict(ec.SampleStream(range(9), 3, (0, 1)).state_dict())
    with pytest.raises(ec.ArgumentError, match="give what state_dict"):
        stream.load_state_dict({})
    with pytest.raises(ec.ArgumentError, match="epochs is 0"):
        stream.batches(0)


def test_ranks_at_other_positions_are_refused() -> None:
    def main(world: World) -> str:
        stream = ec.SampleStream(range(9), 2, world.group)
        if world.rank == 1:
            other = ec.SampleStream(range(9), 2, (0, 1))
            next(other.batches())
            stream.load_state_dict(other.state_dict())
        with pytest.raises(ec.StateError, match="do not read the same data") as info:
            stream.batches()
        return str(info.value)

    assert (
        "rank 1: {'batch_size': 2, 'drop_last': False, 'epoch': 0, 'position': 2}"
        in ec.run(main, 2)[0]
    )


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_is_read(kind: str) -> None:
    stream = ec.SampleStream(SOURCES[kind](), 2, (0, 1))
    assert sum(len(batch) for batch in stream.batches(2)) == 6
