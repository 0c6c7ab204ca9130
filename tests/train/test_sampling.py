"""No sample is missed or repeated, wherever a job stops and on how many ranks it goes on."""

import json
import random
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

import echelon as ec
from echelon.errors import ArgumentError, RankError, StateError
from echelon.train.sample_order import SampleOrder

NUM_SAMPLES, BATCH = 23, 4  # six batches, the last one of three
NUM_BATCHES = 6
ALONE = (0, 1)


class Numbers(Dataset[Tensor]):
    """Sample i is the number i; with ``noise``, also what a worker draws for it."""

    def __init__(self, num_samples: int = NUM_SAMPLES, *, noise: bool = False) -> None:
        self.num_samples, self.noise = num_samples, noise

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        if not self.noise:
            return torch.tensor(index)
        drawn = [torch.randint(2**40, ()), torch.tensor(random.getrandbits(40))]
        return torch.stack([torch.tensor(index), *drawn])


def loader_of(sampler: ec.ResumableSampler, workers: int = 0, **options: Any) -> DataLoader[Tensor]:
    if workers:  # a fork of a process with as many threads as this one may hang
        options["multiprocessing_context"] = "forkserver"
    return DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, **options)


def straight(epoch: int, **options: Any) -> list[list[int]]:
    """The batches of an epoch, as one rank without a stop reads them."""
    order = SampleOrder(num_samples=NUM_SAMPLES, batch_size=BATCH, **options)
    return [order.samples(epoch, batch) for batch in order.batches()]


def read(
    sampler: ec.ResumableSampler, num: int | None = None, workers: int = 0
) -> Iterator[list[int]]:
    """The next batches of this rank, however many epochs they lie in; None: to the epoch's end."""
    epochs = 1 if num is None else None
    for batch in islice(sampler.batches(loader_of(sampler, workers), epochs), num):
        yield [] if batch is None else batch.tolist()


def resumed(
    sampler: ec.ResumableSampler, group: Any = ALONE, **options: Any
) -> ec.ResumableSampler:
    """A new sampler, in a new job, that goes on from the state of ``sampler``."""
    new = ec.ResumableSampler(NUM_SAMPLES, BATCH, group, **options)
    new.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    return new


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_job_that_stops_anywhere_goes_on_with_the_next_sample(
    workers: int, shuffle: bool, epoch: int
) -> None:
    expected = straight(epoch, shuffle=shuffle), straight(epoch + 1, shuffle=shuffle)
    for cut in (0, 1, NUM_BATCHES // 2, NUM_BATCHES - 1, NUM_BATCHES):
        first = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE, shuffle=shuffle)
        if epoch:
            assert list(read(first)) == straight(0, shuffle=shuffle)
        before = list(read(first, cut, workers))
        second = resumed(first, shuffle=shuffle)
        after = list(read(second, None, workers))
        if cut < NUM_BATCHES:
            assert before + after == expected[0]
            assert (second.epoch, second.position) == (epoch + 1, 0)
        else:  # the next epoch, whole and not empty
            assert (before, after) == expected


def test_the_state_counts_what_the_loop_took_and_not_what_workers_have_read_ahead() -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)
    taken = []
    for batch in sampler.batches(loader_of(sampler, 2, prefetch_factor=3)):
        taken += batch.tolist()
        consumed = sampler.epoch * NUM_SAMPLES + sampler.position
        assert consumed == len(taken)
        assert sampler.state_dict()["position"] == len(taken) % NUM_SAMPLES
    assert sorted(taken) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
def test_three_stops_in_one_epoch(workers: int) -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE, seed=5)
    batches = []
    for num in (1, 2, 1, None):
        batches += read(sampler, num, workers)
        sampler = resumed(sampler, seed=5)
    assert batches == straight(0, seed=5)
    assert sampler.epoch == 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_any_number_of_ranks_goes_on_where_another_stopped(
    before: int, after: int, drop_last: bool
) -> None:
    options = {"seed": 3, "drop_last": drop_last}
    expected = straight(0, **options) + straight(1, **options)
    assert sum(map(len, straight(0, **options))) == (20 if drop_last else NUM_SAMPLES)
    for cut in range(len(expected)):
        ranks = [
            ec.ResumableSampler(NUM_SAMPLES, BATCH, (r, before), **options) for r in range(before)
        ]
        parts = zip(*(read(rank, cut) for rank in ranks), strict=True)
        batches = [list(chain.from_iterable(batch)) for batch in parts]
        states = [rank.state_dict() for rank in ranks]
        assert all(state == states[0] for state in states)
        ranks = [resumed(ranks[0], (r, after), **options) for r in range(after)]
        parts = zip(*(read(rank, len(expected) - cut) for rank in ranks), strict=True)
        batches += [list(chain.from_iterable(batch)) for batch in parts]
        assert batches == expected


def test_a_loop_that_was_left_goes_on_and_into_the_next_epoch() -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)
    loader = loader_of(sampler, 2, persistent_workers=True)
    batches = []
    for num in (2, 1, 5, 4):
        batches += [batch.tolist() for batch in islice(sampler.batches(loader, epochs=2), num)]
    assert batches == straight(0) + straight(1)
    assert [b.tolist() for b in sampler.batches(loader)] == straight(2)
    assert sampler.state_dict()["epoch"] == 3


def test_epochs_counts_the_one_that_has_begun() -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)
    list(read(sampler, 2))
    rest = [batch.tolist() for batch in sampler.batches(loader_of(sampler), epochs=2)]
    assert rest == straight(0)[2:] + straight(1)
    with pytest.raises(ArgumentError, match="epochs is 0"):
        sampler.batches(loader_of(sampler), epochs=0)


def test_the_parts_of_a_batch_differ_by_one_sample_and_the_last_may_be_none() -> None:
    ranks = [ec.ResumableSampler(10, 8, (rank, 3), shuffle=False) for rank in range(3)]
    loaders = [DataLoader(Numbers(10), batch_sampler=rank) for rank in ranks]
    steps = []
    for batches in zip(*(r.batches(ld) for r, ld in zip(ranks, loaders, strict=True)), strict=True):
        steps.append([None if b is None else b.tolist() for b in batches])
        weights = [rank.weight for rank in ranks]
        assert weights == ([9 / 8, 9 / 8, 6 / 8] if len(steps) == 1 else [1.5, 1.5, 0.0])
    assert steps == [[[0, 1, 2], [3, 4, 5], [6, 7]], [[8], [9], None]]
    with pytest.raises(StateError, match="weight are those of a batch"):
        assert ranks[0].weight


def test_lengths_are_those_of_the_whole_job() -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, (1, 2))
    assert sampler.num_batches == NUM_BATCHES
    list(read(sampler, 2))
    assert (sampler.num_batches, sampler.position) == (NUM_BATCHES, 2 * BATCH)


# --- other ways to make a loader ------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_it_is_a_sampler_as_well_as_a_batch_sampler(workers: int, size: int) -> None:
    for rank in range(size):
        batched, single, bulk = (
            ec.ResumableSampler(NUM_SAMPLES, BATCH, (rank, size)) for _ in range(3)
        )
        expected = list(read(batched, 9))
        share = len(expected[0])
        loader = DataLoader(Numbers(), share, sampler=single, num_workers=workers)
        batches = [b.tolist() for b in islice(single.batches(loader, epochs=None), 9)]
        assert batches == expected
        assert single.state_dict() == batched.state_dict()
        # Without batching by the loader, the data set is asked for the whole list.
        loader = DataLoader(torch.arange(NUM_SAMPLES), batch_size=None, sampler=bulk)
        assert [b.tolist() for b in islice(bulk.batches(loader, epochs=None), 9)] == expected


def test_batch_samplers_of_a_user_may_count_its_samples() -> None:
    class Pairs(BatchSampler):
        def __len__(self) -> int:
            return -(-len(self.sampler) // 2)  # type: ignore[arg-type]

    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)
    assert len(Pairs(sampler, 2, drop_last=False)) == 12
    assert len(sampler) == NUM_BATCHES


def test_other_loaders_may_iterate_over_it_inside_batches() -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)

    class Doubled:
        def __iter__(self) -> Iterator[list[int]]:
            return ([2 * sample for sample in samples] for samples in sampler)

    batches = list(sampler.batches(Doubled()))
    assert batches == [[2 * sample for sample in batch] for batch in straight(0)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_over_the_loader_itself_is_refused_at_once(workers: int) -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)
    advice = r"write `for batch in sampler.batches\(loader\)`"
    with pytest.raises(StateError, match=advice):
        next(iter(loader_of(sampler, workers)))
    for _ in sampler.batches(loader_of(sampler, workers)):
        with pytest.raises(StateError, match=advice):
            next(iter(loader_of(sampler, workers)))
        break
    with pytest.raises(StateError, match=advice):
        next(iter(sampler))
    assert sampler.position == BATCH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "reads from a RandomSampler, not from this one"),
        ({}, "reads from a SequentialSampler"),
        ({"sampler": "it", "batch_size": 3}, "batch_size=3, drop_last=False. .* of a batch is 2"),
        ({"sampler": "it", "batch_size": 2, "drop_last": True}, "drop_last=True"),
        ({"batch_sampler": "it", "num_workers": 1, "in_order": False}, "in_order=False"),
        ({"dataset": Numbers(24), "batch_sampler": "it"}, "has 24 samples, .* made for 23"),
    ],
)
def test_a_loader_of_other_samples_is_refused(options: dict[str, Any], message: str) -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, (0, 2))
    options = {name: sampler if value == "it" else value for name, value in options.items()}
    with pytest.raises(ArgumentError, match=message):
        sampler.batches(DataLoader(**{"dataset": Numbers(), **options}))


@pytest.mark.parametrize("loader", [None, 3, DataLoader])
def test_what_is_no_loader_is_refused(loader: Any) -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, (0, 1))
    with pytest.raises(ArgumentError, match=r"loader is .*give DataLoader"):
        sampler.batches(loader)


def test_a_loader_that_drops_or_invents_batches_is_named() -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)

    class Shorter:
        def __iter__(self) -> Iterator[list[int]]:
            return islice(iter(sampler), 2)

    class Longer:
        def __iter__(self) -> Iterator[list[int]]:
            yield from sampler
            yield [0]

    with pytest.raises(StateError, match="ended after 2 batches, before the epoch did"):
        list(sampler.batches(Shorter()))
    assert sampler.position == 2 * BATCH
    with pytest.raises(StateError, match="gives more batches than it asks for"):
        list(sampler.batches(Longer()))
    with pytest.raises(StateError, match="gives batches that it never asked for"):
        list(sampler.batches([[1], [2]]))


def test_a_batch_that_could_not_be_made_is_not_counted() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            raise OSError("a disk is full of dust")

    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)
    with pytest.raises(OSError, match="dust"):
        list(sampler.batches(DataLoader(Broken(), batch_sampler=sampler)))
    assert sampler.position == 0
    assert list(read(sampler)) == straight(0)


def test_a_loop_that_another_one_has_overtaken_ends() -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)
    state = sampler.state_dict()
    old = sampler.batches(loader_of(sampler))
    assert next(old).tolist() == straight(0)[0]
    sampler.load_state_dict(state)
    with pytest.raises(StateError, match="overtaken"):
        next(old)
    old, new = (sampler.batches(loader_of(sampler)) for _ in range(2))
    assert next(old).tolist() == straight(0)[0]
    assert next(new).tolist() == straight(0)[1]
    with pytest.raises(StateError, match="overtaken"):
        next(old)
    assert [b.tolist() for b in new] == straight(0)[2:]


# --- states -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 24}, "num_samples is 24 there and 23 here"),
        ({"batch_size": 2}, "batch_size is 2 there and 4 here"),
        ({"seed": 1}, "seed is 1 there and 0 here"),
        ({"seed": True}, "seed is True there"),
        ({"shuffle": False}, "shuffle is False there and True here"),
        ({"drop_last": True}, "drop_last is True there and False here"),
        ({"version": 2}, "version is 2 there and 1 here"),
        ({"epoch": -1}, "epoch of the state is -1"),
        ({"epoch": "1"}, "epoch of the state is '1'"),
        ({"position": 23}, "position of the state is 23; give a whole number <= 22"),
        ({"position": 5}, "position of the state is 5, inside a batch of 4"),
        ({"rank": 0}, "no state of a ResumableSampler: it has .*'rank'"),
    ],
)
def test_a_state_of_another_order_is_refused_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)
    list(read(sampler, 2))
    before = sampler.state_dict()
    with pytest.raises(ArgumentError, match=message):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


def test_numbers_of_numpy_make_the_same_state_as_those_of_python() -> None:
    state = ec.ResumableSampler(np.int64(7), np.int64(2), (0, 1), seed=np.int32(3)).state_dict()
    assert json.loads(json.dumps(state)) == state
    ec.ResumableSampler(7, 2, (0, 1), seed=3).load_state_dict(state)


def test_all_that_differs_is_said_at_once() -> None:
    saved = ec.ResumableSampler(10, 2, ALONE, seed=1).state_dict()
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)
    with pytest.raises(ArgumentError, match=r"num_samples is 10 .* batch_size is 2 .* seed is 1"):
        sampler.load_state_dict(saved)
    with pytest.raises(ArgumentError, match="state is 3; give what state_dict"):
        sampler.load_state_dict(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no state of a ResumableSampler"):
        sampler.load_state_dict({})


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (3, "group is 3; give a Group such as world.group"),
        ((0, 1, 2), r"group is \(0, 1, 2\)"),
        ((0, 0), "size is 0"),
        ((-1, 2), "rank is -1"),
        ((True, 2), "rank is True"),
        ((0, 5), "a batch of 4 samples has none for some of 5 ranks"),
    ],
)
def test_ranks_that_cannot_be_are_refused(group: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ec.ResumableSampler(NUM_SAMPLES, BATCH, group)
    with pytest.raises(RankError):
        ec.ResumableSampler(NUM_SAMPLES, BATCH, (2, 2))


# --- randomness -------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_draws_from_no_global_generator(workers: int) -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = states()
    list(read(ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE), 9, workers))
    assert states() == before


def noise(sampler: ec.ResumableSampler) -> list[list[int]]:
    """What two workers draw for each sample in the rest of an epoch."""
    loader = DataLoader(Numbers(noise=True), batch_sampler=sampler, num_workers=2)
    return [row[1:] for batch in sampler.batches(loader) for row in batch.tolist()]


def test_workers_draw_anew_for_each_epoch_and_rank_and_alike_after_the_same_stop() -> None:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)
    epochs = [noise(sampler), noise(sampler)]
    assert noise(ec.ResumableSampler(NUM_SAMPLES, BATCH, ALONE)) == epochs[0]
    ranks = [noise(ec.ResumableSampler(NUM_SAMPLES, BATCH, (rank, 3))) for rank in (1, 2)]
    every = [draw for part in (*epochs, *ranks) for row in part for draw in row]
    assert len(set(every)) == len(every)
