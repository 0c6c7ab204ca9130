"""What threads that a simulated rank starts keep of it.

They run at any time, and so while the process has the state of another rank.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from echelon.comm.threads.rank_threads import this_rank
from echelon.process.replacement import Installation, Replacement

_NAME = "_kept_of_rank"
_STARTER = "starter"

_readers: dict[str, Callable[[], Any]] = {}


def keep(name: str, read: Callable[[], Any]) -> Callable[[], None]:
    """Let threads that ranks start from now on keep something.

    Args:
        name: by which ``kept`` finds it.
        read: reads it, in the turn of the rank.

    Returns:
        A function that ends this.
    """
    _readers[name] = read

    def forget() -> None:
        _readers.pop(name, None)

    return forget


def kept(name: str) -> Any:
    """What the calling thread keeps of the rank that has started it; None if none has.

    A thread that is itself a rank has its own state, also where another rank has started it.
    """
    if this_rank() is not None:
        return None
    return vars(threading.current_thread()).get(_NAME, {}).get(name)


def started_by(order: object, rank: int) -> list[threading.Thread]:
    """The threads that run and that a rank has started, or one of these has."""
    return [
        thread
        for thread in threading.enumerate()
        if (starter := vars(thread).get(_NAME, {}).get(_STARTER))
        and starter[1] == rank
        and starter[0]() is order
    ]


def _read_starter() -> tuple[weakref.ref[object], int]:
    rank = this_rank()
    assert rank is not None
    return weakref.ref(rank.order), rank.rank


keep(_STARTER, _read_starter)


def _start_and_keep(self: threading.Thread) -> None:
    if this_rank() is not None:
        vars(self)[_NAME] = {name: read() for name, read in _readers.items()}
    else:
        vars(self)[_NAME] = vars(threading.current_thread()).get(_NAME, {})
    _thread_start.original(self)


def _init_as_of_main(
    self: threading.Thread, *args: Any, daemon: bool | None = None, **named: Any
) -> None:
    # The main thread of a process is no daemon, so what it starts is one only if it says so.
    if daemon is None and this_rank() is not None:
        daemon = False
    _thread_init.original(self, *args, daemon=daemon, **named)


_thread_start = Replacement(threading.Thread, "start", _start_and_keep)
_thread_init = Replacement(threading.Thread, "__init__", _init_as_of_main)

# Each rank needs it.
keeping_threads = Installation.of(_thread_start, _thread_init)
