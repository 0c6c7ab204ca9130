"""What the process that local ranks are forked from does besides: it leaves no folder behind.

multiprocessing makes a folder for the socket of its fork server, ``/tmp/pymp-…``, and removes it
when the program that started the server ends in good order. A program that a signal ends does not.
The server ends in good order then, because nobody holds its life line any more; so it removes the
folder. A SIGTERM for all processes of a job reaches the server, too, which does not end by it, as
it does not end by Ctrl-C: it goes with the program. multiprocessing ignores Ctrl-C there only after
the imports, which take seconds, so it is blocked from the start of the server on.

The server imports this module before it forks. Elsewhere the import does nothing.

[Note: the paths of the server]
multiprocessing starts its helpers by ``python -c``, for which Python searches the working directory
first: also for multiprocessing itself, and the directory may be one where others write. So they
start with ``-P``, and the server takes the paths of the program before it imports anything else.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["safe_path"]

_PATH = "ECHELON_FORK_SERVER_PATH"
_FOLDER = "pymp-"  # of multiprocessing.util.get_temp_dir


@contextmanager
def safe_path() -> Iterator[None]:
    """Let helpers of multiprocessing that start in the body search the folders of this program.

    See [Note: the paths of the server].
    """
    util: Any = multiprocessing.util
    flags = util._args_from_interpreter_flags
    util._args_from_interpreter_flags = lambda: [*flags(), "-P"]
    os.environ[_PATH] = json.dumps(sys.path)
    try:
        yield
    finally:
        os.environ.pop(_PATH, None)
        util._args_from_interpreter_flags = flags


def _own_sockets() -> list[Path]:
    """The sockets in such a folder on which this process listens."""
    paths = []
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # the one that lists this folder is gone again
            number = int(entry.name)
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as opened:
                    name = opened.getsockname()
                    if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and name:
                        paths.append(Path(str(name)))
    return [path for path in paths if path.parent.name.startswith(_FOLDER)]


def _remove(sockets: list[Path], server: int) -> None:
    """Remove the sockets and their folders, unless this is a process forked from the server."""
    if os.getpid() != server:
        return
    for path in sockets:
        with suppress(OSError):  # the program was faster, or keeps something else there
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def _serve() -> None:
    if (path := os.environ.pop(_PATH, None)) is not None:
        sys.path[:] = json.loads(path)
    sockets = _own_sockets()
    if sockets:
        atexit.register(_remove, sockets, os.getpid())
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.register_at_fork(after_in_child=partial(_take_signals, before, os.getpid()))


def _take_signals(at_terminate: Any, server: int) -> None:
    """Let a child of the server take signals as any process does; it may decide for its forks."""
    if os.getppid() == server:
        signal.signal(signal.SIGTERM, at_terminate)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


_serve()
