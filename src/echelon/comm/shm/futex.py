"""Sleep until a 32-bit word of shared memory changes: Linux's futex, between processes."""

from __future__ import annotations

import ctypes
import errno
import platform
import threading
from collections.abc import Callable
from functools import partial
from typing import final

from echelon.errors import WorldError

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the word is shared by processes
_EVERYONE = 0x7FFFFFFF
_SEQ_CST = 5  # of C's memory_order


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL while it sleeps
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def _number() -> int:
    try:
        return _NUMBERS[platform.machine()]
    except KeyError:
        raise WorldError(
            f"the futex of {platform.machine()} is not known here: use backend='gloo'"
        ) from None


@final
class Bell:
    """A word of shared memory that threads sleep on; the arguments of its calls are built once."""

    def __init__(self, address: int) -> None:
        number, place = ctypes.c_long(_number()), ctypes.c_void_p(address)
        nothing, zero = ctypes.c_void_p(None), ctypes.c_uint32(0)
        self._wake = (
            number,
            place,
            ctypes.c_int(_WAKE),
            ctypes.c_int(_EVERYONE),
            nothing,
            nothing,
            zero,
        )
        self._wait = (number, place, ctypes.c_int(_WAIT))
        self._rest = (nothing, zero)

    def wake(self) -> None:
        """Wake all threads that sleep on the word."""
        _syscall(*self._wake)

    def wait(self, value: int, seconds: float) -> None:
        """Sleep while the word is ``value``, for at most ``seconds``; may return early."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        outcome = _syscall(*self._wait, ctypes.c_uint32(value), ctypes.byref(limit), *self._rest)
        if outcome == -1 and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise WorldError(f"futex wait failed with errno {ctypes.get_errno()}")


_lock = threading.Lock()


def _lock_and_unlock() -> None:
    _lock.acquire()
    _lock.release()


def fence_of(machine: str) -> Callable[[], object]:
    """What orders all earlier loads and stores of a thread before all later ones, on a machine.

    Python has no memory barrier. On x86, taking a lock is an atomic read-modify-write, which is
    one: without it a plain store may pass a later load. On other machines a lock orders less, so
    the barrier is that of C, which its library of atomics has as a function.
    """
    if machine in ("x86_64", "AMD64"):
        return _lock_and_unlock
    try:
        barrier = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):

        def refuse() -> None:
            raise WorldError(
                f"processes that share memory need a memory barrier, which {machine} gets from "
                "libatomic.so.1, and it is not there: install it (Debian: apt install libatomic1), "
                "or use backend='gloo'"
            )

        return refuse
    return partial(barrier, ctypes.c_int(_SEQ_CST))


fence = fence_of(platform.machine())
"""Order all earlier loads and stores of this thread before all later ones."""
