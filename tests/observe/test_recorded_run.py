import pytest

import echelon as ec
from echelon.observe.recorded_run import RecordedRun
from tests.observe.runs import run_lines


def test_attempts_of_a_restarted_job_have_one_clock_and_steps_made_again_count_once() -> None:
    first = run_lines(ranks=1, finished=False)
    again = run_lines(ranks=1, first=31)
    again[0] |= {"unix_s": first[0]["unix_s"] + 100.0, "attempt": 1}
    run = RecordedRun.of([*first, *again])
    assert len(run.steps) == 50
    assert [line["step"] for line in run.kept] == list(range(1, 41))
    assert run.kept[30]["time_s"] == pytest.approx(100.1)
    (restart,) = run.restarts
    assert (restart.step, restart.time_s) == (30, 100.0)
    assert run.seconds == pytest.approx(104.5)
    assert run.ended


def test_a_restart_without_a_step_yet_is_known_by_its_time() -> None:
    first = run_lines(ranks=1, finished=False)
    again = {**first[0], "unix_s": first[0]["unix_s"] + 9.0}
    (restart,) = RecordedRun.of([*first, again]).restarts
    assert (restart.step, restart.time_s) == (None, 9.0)


def test_utilization_needs_both_numbers() -> None:
    lines = run_lines(ranks=4)
    assert RecordedRun.of(lines).utilization is None
    lines[0] |= {"flops_per_token": 8.0, "peak_flops": 100.0}
    assert RecordedRun.of(lines).utilization == 8.0 / 400.0


def test_lines_without_a_start_are_no_run() -> None:
    with pytest.raises(ec.ArgumentError, match="has no 'start' line"):
        RecordedRun.of(run_lines(ranks=1)[1:])
