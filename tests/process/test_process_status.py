"""What ``/proc`` shows of other processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.process.process_status import (
    ProcessStatus,
    SystemThread,
    activity,
    others_work,
    resident_nbytes,
)
from tests.processes import wait_until


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("code", "doing"),
    [
        ("while True: pass", "computes outside communication"),
        ("import time; time.sleep(1000)", "sleeps or waits outside communication"),
    ],
)
def test_a_process_that_lives_is_seen_to_compute_or_to_sleep(code: str, doing: str) -> None:
    with child(code) as process:
        status = ProcessStatus.of(process.pid)
        assert status is not None
        assert (status.parent, status.ended, status.stopped) == (os.getpid(), False, False)
        wait_until(lambda: activity(process.pid, process.pid) == doing)


def test_a_process_that_is_stopped_and_one_that_has_ended_are_seen_as_such() -> None:
    with child("import time; time.sleep(1000)") as process:
        os.kill(process.pid, signal.SIGSTOP)
        doing = "is stopped by SIGSTOP or a debugger"
        wait_until(lambda: activity(process.pid, process.pid) == doing)
        status = ProcessStatus.of(process.pid)
        assert status is not None
        assert status.stopped
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: activity(process.pid, process.pid) == "has ended")
        status = ProcessStatus.of(process.pid)
        assert status is not None
        assert status.ended  # and nobody has waited for it
    assert ProcessStatus.of(process.pid) is None
    assert activity(process.pid, process.pid) == "has ended"


def test_two_processes_are_told_apart_by_when_they_were_started() -> None:
    mine = ProcessStatus.of(os.getpid())
    assert mine is not None
    assert mine == ProcessStatus(mine.state, os.getppid(), mine.start_ticks)
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))
    with child("import time; time.sleep(1000)") as process:
        other = ProcessStatus.of(process.pid)
        assert other is not None
        assert other.start_ticks > mine.start_ticks


def test_the_memory_of_a_process_is_known_while_it_lives() -> None:
    nbytes = resident_nbytes(os.getpid())
    assert nbytes is not None
    assert nbytes > 2**20
    assert resident_nbytes(2**30) is None


BUSY = "while True: pass"
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {BUSY!r}])"


@pytest.mark.slow
@pytest.mark.parametrize("code", [BUSY, STARTS])
def test_what_a_process_has_started_works_as_long_as_any_of_it_runs(code: str) -> None:
    with child("import time; time.sleep(1000)"):
        wait_until(lambda: not others_work())
    with child(code) as process:
        wait_until(others_work)
        time.sleep(0.5)
        assert others_work()
        for number in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(number), signal.SIGKILL)
    wait_until(lambda: not others_work())


def test_threads_of_this_process_work_and_the_calling_one_does_not_count() -> None:
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    wait_until(lambda: not others_work())
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        wait_until(others_work)
    finally:
        over.set()
        thread.join()


def test_a_thread_of_the_system_is_alive_until_it_has_ended() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    found = SystemThread.of(thread.native_id)
    assert found is not None
    assert found.is_alive()
    go_on.set()
    thread.join()
    wait_until(lambda: not found.is_alive())
