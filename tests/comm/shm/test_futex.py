"""A thread sleeps until a word of shared memory changes, another one wakes it, or time is up."""

import ctypes
import platform
import threading
import time

import pytest

from echelon.comm.shm import futex
from echelon.comm.shm.futex import Bell, fence_of
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


def test_another_machine_than_x86_has_the_barrier_of_c_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    barriers: list[int] = []

    class Atomics:
        def atomic_thread_fence(self, order: ctypes.c_int) -> None:
            barriers.append(order.value)

    monkeypatch.setattr(futex.ctypes, "CDLL", lambda name: Atomics())
    fence_of("aarch64")()
    fence_of("x86_64")()
    assert barriers == [5]  # memory_order_seq_cst

    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(futex.ctypes, "CDLL", absent)
    with pytest.raises(WorldError, match=r"which aarch64 gets from libatomic\.so\.1.*install it"):
        fence_of("aarch64")()
