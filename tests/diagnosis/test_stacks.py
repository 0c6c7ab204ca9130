"""Stacks of other processes, whatever these do; and what a stack shows."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from echelon.diagnosis import stacks
from echelon.diagnosis.flight_recorder import FlightRecorder, RankStatus

PROCESS = """
import os, signal, sys, threading, time
from echelon.diagnosis import stacks
from echelon.diagnosis.flight_recorder import FlightRecorder, Phase

def computes():
    while True:
        pass

def computes_in_c():
    sum(range(1 << 62))

def sleeps():
    time.sleep(1000)

def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def is_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def becomes_another_program():
    print("ready", flush=True)
    os.execv("/bin/sleep", ["sleep", "1000"])

def has_its_own_use():
    signal.signal(signal.SIGUSR2, lambda number, frame: print("mine", flush=True))
    sleeps()

page = FlightRecorder.open(sys.argv[1]).rank_records[0]
page.begin(rank=0, attempt=0)
if sys.argv[2] == "takes_the_signal_before":
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
page.offer_stacks(stacks.offer())
page.set_phase(Phase.RUNNING)
print("ready", flush=True)
globals().get(sys.argv[2], sleeps)()
"""


@contextmanager
def process(what: str) -> Iterator[tuple["subprocess.Popen[str]", RankStatus]]:
    """A process that does ``what``, and its page."""
    book = FlightRecorder.create(1)
    child = subprocess.Popen(
        [sys.executable, "-c", PROCESS, book.path, what], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.2)  # it is in there, or about to be
        yield child, book.statuses()[0]
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("what", ["computes", "computes_in_c", "sleeps", "waits_for_a_lock"])
def test_a_process_shows_its_stack_whatever_it_does(what: str) -> None:
    with process(what) as (child, entry):
        shown = stacks.ask([entry])[0]
        assert shown[-1].endswith(f"in {what}"), shown
        assert shown[0].endswith("in <module>")
        assert child.poll() is None


@pytest.mark.parametrize("what", ["is_stopped", "takes_the_signal_before"])
def test_a_process_that_cannot_be_asked_is_left_alone(what: str) -> None:
    with process(what) as (child, entry):
        assert stacks.ask([entry]) == {}
        assert child.poll() is None
        assert (entry.stacks_fd is None) == (what == "takes_the_signal_before")


@pytest.mark.slow
def test_a_process_that_became_another_program_is_not_ended_by_being_asked() -> None:
    with process("becomes_another_program") as (child, entry):
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.2)
        assert stacks.ask([entry]) == {}
        assert child.poll() is None


def test_a_process_that_has_ended_has_no_stack() -> None:
    with process("sleeps") as (child, entry):
        child.kill()
        child.wait()
        assert stacks.ask([entry]) == {}


def test_a_process_that_was_asked_a_moment_ago_is_not_asked_again() -> None:
    with process("sleeps") as (_, entry):
        first = stacks.ask([entry])
        size = os.stat(f"/proc/{entry.pid}/fd/{entry.stacks_fd}").st_size
        assert stacks.ask([entry]) == first
        assert os.stat(f"/proc/{entry.pid}/fd/{entry.stacks_fd}").st_size == size


def test_a_script_that_takes_the_signal_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stacks.is_ours()
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        assert not stacks.is_ours()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_thread_of_this_process_shows_its_stack() -> None:
    end = threading.Event()

    def waits_in_a_thread() -> None:
        end.wait()

    thread = threading.Thread(target=waits_in_a_thread)
    thread.start()
    assert thread.ident is not None
    shown = stacks.of_this_process(thread.ident)
    end.set()
    thread.join()
    assert any(line.endswith("in waits_in_a_thread") for line in shown)
    assert stacks.of_this_process(0) == []


OURS = stacks.__file__


def test_a_stack_is_shown_from_the_users_first_line_on() -> None:
    stack = [f"{OURS}:1 in rank_main", "train.py:9 in main", f"{OURS}:3 in wait"]
    assert stacks.innermost(stack) == stack[1:]
    assert stacks.innermost(stack[:1]) == stack[:1]
    assert stacks.innermost([]) == []


def test_of_a_deep_stack_the_end_and_the_users_innermost_line_are_shown() -> None:
    deep = ["train.py:1 in main", "train.py:2 in step", *(f"{OURS}:{i} in f" for i in range(20))]
    assert stacks.innermost(deep) == ["train.py:2 in step", "...", *deep[-6:]]
    users = [f"train.py:{i} in f" for i in range(20)]
    assert stacks.innermost(users) == users[-8:]


CRASH = """some words
Fatal Python error: Segmentation fault

Thread 0x00007f0000000002 (most recent call first):
  File "other.py", line 5 in run

Current thread 0x00007f0000000001 (most recent call first):
  File "ctypes.py", line 519 in string_at
  File "train.py", line 3 in <module>

Extension modules: numpy._core (total: 1)
"""


def test_the_stack_of_a_crash_is_found_in_what_was_written() -> None:
    assert stacks.of_crash(CRASH) == ["train.py:3 in <module>", "ctypes.py:519 in string_at"]
    assert stacks.of_crash("Traceback (most recent call last):\nValueError\n") == []
