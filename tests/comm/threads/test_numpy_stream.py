"""Each rank draws from a generator of NumPy of its own, as a process does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import echelon as ec
from echelon.comm.threads import numpy_stream
from echelon.comm.threads.numpy_stream import NumpyStream


@pytest.fixture(autouse=True)
def _streams_of_the_process() -> Iterator[None]:
    generator, state = numpy.random.get_bit_generator(), numpy.random.get_state(legacy=False)
    yield
    numpy.random.set_bit_generator(generator)
    numpy.random.set_state(state)


def draws(count: int) -> list[float]:
    return [numpy.random.standard_normal() for _ in range(count)]


@pytest.mark.parametrize("already_drawn", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", [numpy.random.MT19937, numpy.random.PCG64])
def test_a_copy_draws_what_the_original_draws_and_leaves_it_alone(
    kind: Any, already_drawn: int
) -> None:
    numpy.random.set_bit_generator(kind(3))
    draws(already_drawn)
    stream = NumpyStream()
    saved = stream.save()
    copies = [stream.copy(saved) for _ in range(2)]
    expected = draws(5)
    for copy in copies:
        stream.restore(copy)
        assert draws(5) == expected


@pytest.mark.parametrize("drawn", [1, 2, 3])
def test_a_turn_of_another_rank_takes_no_number_from_a_stream(drawn: int) -> None:
    def main(world: ec.World) -> list[float]:
        numpy.random.seed(world.rank)
        first = draws(drawn)
        world.group.barrier()
        return [*first, *draws(4)]

    expected = []
    for seed in range(3):
        numpy.random.seed(seed)
        expected.append(draws(drawn + 4))
    assert ec.run(main, 3) == expected


def test_ranks_and_their_caller_go_on_where_the_caller_was() -> None:
    numpy.random.seed(3)
    draws(1)
    ahead = numpy.random.get_state(legacy=False)
    expected = draws(3)
    numpy.random.set_state(ahead)
    assert ec.run(lambda world: draws(3), 2) == [expected] * 2
    assert draws(3) == expected


def test_the_number_that_is_kept_is_seen() -> None:
    keeps = numpy_stream._number_kept(numpy.random)
    assert not isinstance(keeps, SimpleNamespace)
    numpy.random.seed(3)
    seen = []
    for _ in range(4):
        seen.append(bool(keeps.value))
        draws(1)
    assert seen == [False, True, False, True]


def test_where_the_number_is_not_in_memory_it_is_asked_for_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numpy_stream, "_ints_of", lambda state: [0, 0])
    stream = NumpyStream()
    numpy.random.seed(3)
    draws(1)
    saved = stream.save()
    expected = draws(1)
    stream.restore(saved)
    assert draws(1) == expected


def test_where_the_words_are_no_state_each_copy_is_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numpy_stream.ctypes, "string_at", lambda *_: bytes(2500))
    stream = NumpyStream()
    for seed in (3, 4):
        numpy.random.seed(seed)
        saved = stream.save()
        copy = stream.copy(saved)
        expected = draws(2)
        stream.restore(copy)
        assert draws(2) == expected
        stream.restore(saved)
