"""What the caller of run learns of a rank that dies: how, at which step, and its last call."""

import re
import time

import pytest

import echelon as ec
from echelon.errors import RankFailed
from tests.world import faults

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
