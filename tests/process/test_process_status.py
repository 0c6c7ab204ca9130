"""What ``/proc`` shows of other processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.process.process_status import ProcessStatus, activity, open_memory
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


def test_memory_is_opened_by_its_path_and_name_and_nothing_else_is(tmp_path: Path) -> None:
    descriptor = os.memfd_create("of a test", os.MFD_CLOEXEC)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    os.write(descriptor, b"abc")
    opened = open_memory(path, "of a test")
    assert os.pread(opened, 3, 0) == b"abc"
    os.close(opened)
    with pytest.raises(OSError, match="is no memory that is called 'of another'"):
        open_memory(path, "of another")
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="is no memory that is called 'of a test'"):
        open_memory(str(tmp_path / "link"), "of a test")
    os.close(descriptor)
    with pytest.raises(OSError, match="No such file"):
        open_memory(path, "of a test")
