"""Where ``breakpoint()`` and functions of ``pdb`` lead while simulated ranks run.

Whatever else a user has chosen is respected: ``PYTHONBREAKPOINT``, and the hook of a debugger that
is attached, such as debugpy's.
"""

from __future__ import annotations

import os
import pdb
import sys
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FrameType, TracebackType
from typing import Any

from echelon.process.offered_debugger import open_debugger
from echelon.process.replacement import Installation, Replacement

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep


def stop_caller() -> None:
    """Open a debugger in the line of the user that has led here."""
    _stop(sys._getframe(1))


def _stop(frame: FrameType | None, *args: Any, **options: Any) -> Any:
    hook = _hook.original if sys.breakpointhook is _breakpointhook else sys.breakpointhook
    if os.environ.get("PYTHONBREAKPOINT") or not _is_free(hook):
        return hook(*args, **options)
    _open(frame, None)
    return None


def _is_free(hook: Callable[..., Any]) -> bool:
    """Whether no debugger is behind a hook: Python's own, and debugpy's if it is not attached."""
    if isinstance(hook, BuiltinFunctionType):
        return True
    debugpy = sys.modules.get("debugpy")  # a kernel of a notebook imports it
    is_debugpys = hook.__module__.partition(".")[0] in ("debugpy", "pydevd")
    return is_debugpys and not (debugpy and debugpy.is_client_connected())


def _open(frame: FrameType | None, header: str | None) -> None:
    while frame is not None and frame.f_back and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    assert frame is not None
    open_debugger(frame, header)


def _set_trace(*_: Any, header: str | None = None, **__: Any) -> None:
    """Stands for ``pdb.set_trace`` while ranks run."""
    _open(sys._getframe(1), header)


def _look_back(t: TracebackType | None = None) -> None:
    """Stands for ``pdb.post_mortem``, and so for ``pdb.pm``, while ranks run."""
    trace = sys.exc_info()[2] if t is None else t
    if trace is None:
        _post_mortem.original(t)  # raises what Python's own would
        return
    open_debugger(trace)


def _breakpointhook(*args: Any, **options: Any) -> Any:
    """Stands for the hook of ``breakpoint()`` while ranks run."""
    return _stop(sys._getframe(1), *args, **options)


_post_mortem = Replacement(pdb, "post_mortem", _look_back)
_hook = Replacement(sys, "breakpointhook", _breakpointhook, over=_is_free)
# Each rank needs it.
debugger_of_ranks = Installation.of(Replacement(pdb, "set_trace", _set_trace), _post_mortem, _hook)
