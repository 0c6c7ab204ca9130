"""The position in one source, and the ways to get there again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon.errors import ArgumentError, StateError
from echelon.train.source_cursor import END, SourceCursor


class Numbers(IterableDataset[int]):
    """A stream that counts what it reads, and gives other numbers in each epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.num_read = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for i in range(self.length):
            self.num_read += 1
            yield 100 * self.epoch + i


class Seekable(Numbers):
    """The same, with a state."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.num_read += 1
            self.at += 1
            yield 100 * self.epoch + self.at - 1
        self.at = 0


def read(cursor: SourceCursor, num: int) -> list[Any]:
    return ["end" if (sample := cursor.read()) is END else sample for _ in range(num)]


SOURCES = {
    "list": lambda: [7, 8, 9],
    "function": lambda: lambda epoch: (100 * epoch + i for i in range(3)),
    "stream": lambda: Numbers(3),
    "state": lambda: Seekable(3),
    "loader": lambda: DataLoader(Numbers(3), batch_size=None),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("position", range(10))
def test_a_cursor_with_the_state_of_another_reads_what_that_reads_next(
    kind: str, position: int
) -> None:
    cursor, other = SourceCursor(SOURCES[kind]()), SourceCursor(SOURCES[kind]())
    read(cursor, position)
    state = cursor.state_dict()
    other.load_state_dict(state)
    assert other.state_dict() == state  # also before it has read anything
    assert (other.epoch, other.position) == (cursor.epoch, cursor.position)
    assert read(other, 9) == read(cursor, 9)


def test_epochs_differ_where_the_source_is_told_the_epoch() -> None:
    assert read(SourceCursor(Numbers(2)), 6) == [0, 1, "end", 100, 101, "end"]
    assert read(SourceCursor(SOURCES["function"]()), 5) == [0, 1, 2, "end", 100]
    assert read(SourceCursor([5]), 4) == [5, "end", 5, "end"]


def test_a_source_with_a_state_reads_nothing_twice() -> None:
    for source, expected in ((Numbers(9), 6), (Seekable(9), 1)):
        cursor = SourceCursor(Seekable(9) if isinstance(source, Seekable) else Numbers(9))
        read(cursor, 5)
        other = SourceCursor(source)
        other.load_state_dict(cursor.state_dict())
        assert read(other, 1) == [5]
        assert source.num_read == expected


def test_the_global_generator_is_not_drawn_from() -> None:
    cursor = SourceCursor(DataLoader(Numbers(3), batch_size=None))
    before = torch.get_rng_state()
    read(cursor, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (iter([1]), "is a list_iterator, which can be read only once"),
        ((i for i in range(3)), "is a generator, which can be read only once"),
        (DataLoader(Numbers(3)), "a loader that makes batches: give it batch_size=None"),
        (3, "source is 3; give an iterable, or a function of an epoch"),
    ],
)
def test_what_is_no_source_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SourceCursor(source)


def test_states_that_do_not_fit_are_refused() -> None:
    cursor = SourceCursor([1, 2, 3], "web")
    read(cursor, 3)
    state = cursor.state_dict()
    with pytest.raises(ArgumentError, match=r"web: 3 is no state of a source"):
        cursor.load_state_dict(3)  # type: ignore[arg-type]
    workers = SourceCursor(DataLoader(Numbers(9), batch_size=None, num_workers=2), "web")
    with pytest.raises(ArgumentError, match="web was read by 0 workers, and has 2 here"):
        workers.load_state_dict(state)
    shorter = SourceCursor([1, 2], "web")
    shorter.load_state_dict(state)
    with pytest.raises(StateError, match="web ended after 2 samples of epoch 0, of which 3"):
        shorter.read()
    stateless = SourceCursor([1, 2])
    seekable = SourceCursor(Seekable(3))
    read(seekable, 1)
    stateless.load_state_dict(seekable.state_dict())
    with pytest.raises(StateError, match=r"source has no load_state_dict\(\)"):
        stateless.read()
