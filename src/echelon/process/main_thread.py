"""What only the main thread of a process may do, done for ranks that are other threads of it.

Python installs signal handlers in the main thread only. Simulated ranks are other threads; while
they run, the main one waits for them, and can do as they ask.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Request:
    """Something that a thread asks the main one to call."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.done = threading.Event()
        self.was_called = False


class _Desk:
    """Where threads leave their requests, while the main thread comes by."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: deque[_Request] = deque()
        self.open = False


_desk = _Desk()


def in_main_thread(function: Callable[[], None], *, wait: bool = True) -> bool:
    """Have the main thread call ``function``, which must not raise; or call it, if this is it.

    Args:
        wait: return when it has been called, otherwise at once.

    Returns:
        whether it is called; False if the main thread waits for no simulated ranks, or stops to.

    Example:
        >>> in_main_thread(lambda: print(threading.current_thread().name))
        MainThread
        True
    """
    if threading.current_thread() is threading.main_thread():
        function()
        return True
    request = _Request(function)
    with _desk.lock:
        if not _desk.open:
            return False
        _desk.requests.append(request)
    if wait:
        # Without a limit: as long as the desk is open the main thread comes by, and it does what
        # is left when it closes. How long the call itself takes is for who asks to say: a person
        # may type a line in it.
        request.done.wait()
        return request.was_called
    return True


@contextmanager
def serving() -> Iterator[None]:
    """Take requests while the body runs, which calls ``serve`` now and then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _desk.open = True
    try:
        yield
    finally:
        with _desk.lock:
            _desk.open = False
        _serve_rest()


def _serve_rest() -> None:
    """Do what came last; whoever asked is freed, also where a call of it raises (Ctrl-C)."""
    try:
        serve()
    finally:
        with _desk.lock:
            while _desk.requests:
                _desk.requests.popleft().done.set()


def serve() -> None:
    """Do what was asked of the main thread, if this is it."""
    if threading.current_thread() is not threading.main_thread():
        return
    while True:
        with _desk.lock:
            if not _desk.requests:
                return
            request = _desk.requests.popleft()
        request.was_called = True
        try:
            request.function()
        finally:
            request.done.set()
