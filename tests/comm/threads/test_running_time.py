"""A clock that stands still while ranks are stopped."""

import time

from echelon.comm.threads.running_time import running_s, stopped_time


def test_the_clock_stands_until_the_last_stop_has_ended() -> None:
    with stopped_time():
        before = running_s()
        with stopped_time():
            time.sleep(0.02)
        time.sleep(0.02)
        assert running_s() == before
    time.sleep(0.02)
    assert running_s() - before >= 0.02


def test_it_runs_as_fast_as_the_clock_of_the_machine() -> None:
    before, before_machine = running_s(), time.monotonic()
    time.sleep(0.05)
    assert running_s() - before <= time.monotonic() - before_machine
    assert running_s() - before >= 0.05
