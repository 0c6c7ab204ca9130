"""What the caller of run learns of a rank that dies: how, at which step, and its last call."""

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.errors import RankFailed
from tests.comm import faults

STEP = 4


@pytest.mark.parametrize("death", ["SIGKILL", "SIGSEGV", "exit code 0"])
def test_a_process_that_dies_without_a_word_is_named_with_its_step(death) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankFailed, match=rf"rank 1 .*{death}.*while this rank was in") as info:
        ec.run(faults.train, 2, "processes", args=(faults.DEATHS[death], STEP, None), timeout=60.0)
    assert time.monotonic() - start_s < 30  # and not a minute
    assert info.value.failed_rank == 1
    assert info.value.__notes__[1:] == ["raised on rank 1 of 2", f"rank 1 was at step {STEP}"]
    last = info.value.__notes__[0]
    assert re.match(r"its last call was all_reduce\(mean\) .* \(#\d+ of group 'world'\) at ", last)
    assert f"{faults.__file__}:" in last


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("death", ["ValueError: boom", "MemoryError: cannot allocate 12 GiB"])
def test_an_exception_in_a_save_is_told_with_the_step_after_it(kind, death, tmp_path) -> None:
    name, _, message = death.partition(": ")
    with pytest.raises((ValueError, MemoryError), match=message) as info:
        ec.run(faults.train, 2, kind, args=(faults.DEATHS[death], STEP, str(tmp_path / "state")))
    assert type(info.value).__name__ == name
    assert info.value.__notes__[:2] == ["raised on rank 1 of 2", f"rank 1 was at step {STEP + 1}"]


class Refuses:
    """A state that cannot be saved on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        if self.rank == 1:
            raise ValueError("boom")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to do."""


def saves_and_fails_late(world: ec.World, folder: str) -> None:
    """Rank 0 hears of the error of rank 1, and ends before it."""
    model = ec.DDP(torch.nn.Linear(2, 2), world.group)
    try:
        ec.save(folder, step=1, model=model, part=Refuses(world.rank))
    except ValueError:
        time.sleep(0.5)
        raise


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_the_rank_on_which_a_save_failed_is_the_cause_even_if_another_ends_first(
    kind, tmp_path
) -> None:
    with pytest.raises(ValueError, match="boom") as info:
        ec.run(saves_and_fails_late, 2, kind, args=(str(tmp_path / "run"),))
    assert info.value.__notes__ == ["raised on rank 1 of 2"]


class Dies:
    """An argument that a rank dies of which gets it: at once, or while it waits for the other."""

    def __init__(self, how: Callable[[], None]) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how, ()


def at_once() -> None:
    if multiprocessing.current_process().name == "rank 1":
        os._exit(3)


def while_it_waits() -> None:
    if multiprocessing.current_process().name == "rank 1":
        threading.Timer(0.5, os._exit, (3,)).start()
    else:
        time.sleep(60.0)


def passes(world: ec.World, dies: Dies) -> None:
    """A rank function that rank 1 never gets to."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "place"),
    [
        (at_once, "it had not entered its world: it was importing the script, and"),
        (while_it_waits, "rank 1 was entering its world and had not called the function yet"),
    ],
)
def test_a_process_that_dies_before_its_function_is_called_is_told_so(how, place) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 ended with exit code 3") as info:
        ec.run(passes, 2, "processes", args=(Dies(how),), timeout=60.0)
    assert [note for note in info.value.__notes__ if note.startswith(place)]
