"""Jobs that are asked to stop and go on, and jobs that lose ranks, many times over."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cli.jobs import Job
from tests.long.training import NUM_STEPS, SCRIPT, progress, result

REPETITIONS = 10
STOP_S = 10.0  # to save and end after a signal
RECOVER_S = 15.0  # to the next step after a rank was killed
FINISHED = {"step": NUM_STEPS, "total": 3.0 * NUM_STEPS * (NUM_STEPS + 1) / 2}


@pytest.mark.parametrize("repetition", range(REPETITIONS))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_is_stopped_goes_on_as_if_nothing_had_happened(
    number: signal.Signals, repetition: int, tmp_path: Path
) -> None:
    options = ("--grace", "60", "--max-restarts", "2")
    with Job(tmp_path, SCRIPT, str(tmp_path), options=options) as job:
        job.wait(lambda: len(progress(tmp_path)) > 7 * repetition)
        start_s = time.monotonic()
        job.launcher.send_signal(number)
        code, _, errors = job.end()
        assert time.monotonic() - start_s < STOP_S
        assert code == 75, errors
        assert errors[0].startswith(f"{number.name}: all ranks have left to go on later")
        assert len(errors) == 1
        assert job.processes() == {}
    done = progress(tmp_path)[-1].step
    assert done < NUM_STEPS  # or the signal came too late to prove anything
    assert result(tmp_path)["step"] == done
    with Job(tmp_path, SCRIPT, str(tmp_path), options=options) as job:
        code, _, errors = job.end()
    assert (code, errors) == (0, [])
    assert result(tmp_path) == FINISHED
    assert [one.step for one in progress(tmp_path)] == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize("repetition", range(REPETITIONS))
def test_a_job_that_loses_ranks_goes_on_from_what_it_saved_last(
    repetition: int, tmp_path: Path
) -> None:
    start_s = time.time()
    with Job(tmp_path, SCRIPT, str(tmp_path), options=("--max-restarts", "2")) as job:
        job.wait(lambda: len(progress(tmp_path)) > 0)
        # A machine that is busy with other things starts processes slowly, at first and again.
        recover_s = max(RECOVER_S, progress(tmp_path)[0].time_s - start_s)
        for attempt in range(2):
            aim = 25 + 40 * attempt + 3 * repetition
            job.wait(lambda aim=aim: any(one.step >= aim for one in progress(tmp_path)))
            rank = (attempt + repetition) % 2
            os.kill(int((tmp_path / f"pid-{rank}-{attempt}").read_text()), signal.SIGKILL)
            kill_s = time.time()
            job.wait(lambda next=attempt + 1: progress(tmp_path)[-1].attempt == next)
            steps = progress(tmp_path)
            first = next(one for one in steps if one.attempt == attempt + 1)
            before = [one.step for one in steps if one.attempt == attempt]
            assert first.time_s - kill_s < recover_s
            # It saves every ten steps; of those after, the last may just have been saved.
            assert first.step - 1 in (before[-1] // 10 * 10, (before[-1] - 1) // 10 * 10)
        code, _, errors = job.end()
        assert code == 0
        for attempt, line in enumerate(errors[0::2]):
            assert re.fullmatch(rf"rank {(attempt + repetition) % 2} .*was killed by SIGKILL", line)
        assert [line.split(":")[0] for line in errors[1::2]] == [
            "attempt 2 of 3 begins",
            "attempt 3 of 3 begins",
        ]
    assert result(tmp_path) == FINISHED
