"""The state of Python's random numbers is saved whenever it has changed, and only then."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from echelon.comm.threads.python_stream import PythonStream

DRAWS: list[Callable[[], Any]] = [
    random.random,
    lambda: random.getrandbits(1),
    lambda: random.shuffle([1, 2, 3]),
    lambda: random.gauss(0.0, 1.0),
    lambda: random.seed(3),
    lambda: random.setstate(random.Random(5).getstate()),
]


@pytest.fixture(autouse=True)
def state() -> Iterator[Any]:
    before = random.getstate()
    yield before
    random.setstate(before)


def test_a_state_that_has_not_changed_is_the_same_object() -> None:
    stream = PythonStream()
    assert stream.save() is stream.save()


@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_is_seen(draw: Callable[[], Any], state: Any) -> None:
    random.seed(7)
    stream = PythonStream()
    before = stream.save()
    draw()
    after = stream.save()
    assert after == random.getstate()
    assert after is not before
    stream.restore(before)
    assert random.getstate() == stream.save() == before
    assert stream.save() is before


def test_the_second_number_of_a_pair_of_gauss_is_seen() -> None:
    random.seed(7)
    stream = PythonStream()
    random.gauss(0.0, 1.0)  # it keeps a second number, which the next call gives
    kept = stream.save()
    second = random.gauss(0.0, 1.0)
    assert stream.save() is not kept
    stream.restore(kept)
    assert random.gauss(0.0, 1.0) == second


def test_where_the_state_is_not_in_memory_it_is_read_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "echelon.comm.threads.python_stream._words_of"
    monkeypatch.setattr(module, lambda generator: ())
    stream = PythonStream()
    random.random()
    assert stream.save() == random.getstate()
