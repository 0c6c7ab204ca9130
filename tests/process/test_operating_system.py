"""What a system does not have is refused in a sentence, or done without."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import pytest

from echelon.errors import UnsupportedError
from echelon.process.operating_system import (
    at_fork,
    c_function,
    num_processors,
    require_linux,
    signals_named,
)


def test_what_needs_linux_is_refused_elsewhere_and_says_what_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_linux("worlds of processes")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match=r'this is darwin.*world="threads".*"gloo"'):
        require_linux("worlds of processes")


def test_a_callback_is_called_in_a_fork() -> None:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:  # nobody can take the callback back, so it ends with this process
        try:
            at_fork(after_in_child=lambda: os.write(writer, b"1"))
            if os.fork():
                os.wait()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert os.read(reader, 9) == b"1"
    os.close(reader)


def test_a_system_without_forks_calls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "register_at_fork")
    at_fork(after_in_child=lambda: None)


def test_the_processors_are_those_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert num_processors() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert num_processors() == 7


def test_signals_that_are_not_there_are_left_out() -> None:
    assert signals_named("SIGTERM", "SIGNONE", "SIGUSR1") == (signal.SIGTERM, signal.SIGUSR1)


def test_a_function_of_c_is_one_that_can_be_called_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert c_function("getpid")() == os.getpid()
    assert c_function("no_such_function") is None
    c_function("close")(-1)
    assert ctypes.get_errno() != 0
    monkeypatch.setattr(sys, "platform", "win32")
    assert c_function("getpid") is None
