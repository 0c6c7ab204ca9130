"""A thread sleeps until a word of shared memory changes, another one wakes it, or time is up."""

import ctypes
import platform
import threading
import time

import pytest

from echelon.comm.shm.futex import Bell
from echelon.errors import WorldError
from tests.processes import becomes_true


def word_and_bell() -> tuple[ctypes.c_uint32, Bell]:
    word = ctypes.c_uint32(7)
    return word, Bell(ctypes.addressof(word))


def test_a_sleeper_is_woken_long_before_its_time_is_up() -> None:
    word, bell = word_and_bell()
    seconds: list[float] = []

    def sleep() -> None:
        start_s = time.monotonic()
        while word.value == 7:  # a wait may return early
            bell.wait(7, 60.0)
        seconds.append(time.monotonic() - start_s)

    sleepers = [threading.Thread(target=sleep, daemon=True) for _ in range(3)]
    for thread in sleepers:
        thread.start()
    time.sleep(0.05)  # they sleep by now, or see the new value before they do
    word.value = 8
    bell.wake()
    assert becomes_true(lambda: len(seconds) == 3, 20.0)
    assert max(seconds) < 20.0


def test_a_wait_returns_when_its_time_is_up() -> None:
    word, bell = word_and_bell()
    start_s = time.monotonic()
    while time.monotonic() - start_s < 0.1:
        bell.wait(word.value, 0.1)
    assert time.monotonic() - start_s < 5.0


def test_a_word_that_has_changed_already_is_not_waited_for() -> None:
    _, bell = word_and_bell()
    start_s = time.monotonic()
    bell.wait(6, 60.0)
    assert time.monotonic() - start_s < 5.0


def test_an_address_that_is_no_word_is_an_error() -> None:
    with pytest.raises(WorldError, match="futex wait failed with errno"):
        Bell(1).wait(0, 0.1)


def test_a_machine_without_a_known_futex_is_told_what_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(WorldError, match="the futex of vax is not known here: use backend='gloo'"):
        Bell(0)
