"""Processes that a test starts: ports for them, and waiting for what they do."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from echelon.process.process_status import ProcessStatus
from tests.children import environ

__all__ = ["becomes_true", "free_port", "has_ended", "run_python", "wait_until"]

WAIT_S = 90.0  # on a busy machine some starts take this long
POLL_S = 0.01
_anywhere = random.SystemRandom()  # no two workers take the same ports in turn


def free_port() -> int:
    """A port that was free a moment ago, below those that Linux gives to connections."""
    while True:
        port = _anywhere.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def has_ended(pid: int) -> bool:
    """Whether a process has ended; where nobody waits for orphans it may still be listed."""
    status = ProcessStatus.of(pid)
    return status is None or status.ended


def becomes_true(condition: Callable[[], object], limit_s: float = WAIT_S) -> bool:
    """Whether ``condition()`` becomes true within ``limit_s``."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def wait_until(
    condition: Callable[[], object],
    *processes: subprocess.Popen[str],
    limit_s: float = WAIT_S,
) -> None:
    """Wait until ``condition()`` is true, and fail at once when one of ``processes`` has ended."""

    def is_met() -> bool:
        if condition():
            return True
        for process in processes:
            assert process.poll() is None, process.communicate()
        return False

    assert becomes_true(is_met, limit_s), f"the condition is not met after {limit_s:g} s"


def run_python(
    *arguments: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with ``arguments`` and environment ``variables``, and wait for its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
        env=environ(**variables),
        check=False,
    )
