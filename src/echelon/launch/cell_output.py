"""What ranks print while a cell of a notebook runs: whole lines, each with the rank's number.

A simulated rank prints into the cell's stream from its own thread. A rank that is a process has
the output of the process that all ranks are forked from, which is the log of the kernel; so it
writes into a file, and the cell copies the files while the ranks run.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from echelon.launch.rank_lines import WholeLines, printing_as
from echelon.launch.rank_output import RunFolder, Screen
from echelon.process.background_threads import run_in_background
from echelon.process.lossy_streams import lose_rather_than_raise
from echelon.process.notebook import in_notebook

_COPY_S = 0.05  # how often a cell copies what processes have printed


@contextmanager
def shown_in_cell(fn: Callable[..., Any], ranks: int, world: str) -> Iterator[Callable[..., Any]]:
    """In a notebook, show in the cell what ranks print; gives the function that they call.

    Elsewhere it gives ``fn`` itself and does nothing.
    """
    if not in_notebook():
        yield fn
    elif world == "threads":
        with _marked_lines():
            yield _Marked(fn)
    else:
        with _copied_files(ranks) as folder:
            yield _Redirected(fn, folder)


@contextmanager
def _marked_lines() -> Iterator[None]:
    if isinstance(sys.stdout, WholeLines):  # a rank of a run has called ``run``
        yield
        return
    with redirect_stdout(WholeLines(sys.stdout, tee=True)):
        yield


class _Marked:
    """The function of ``run``, whose lines show the rank."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __repr__(self) -> str:
        return repr(self.fn)

    def __call__(self, world: Any, *args: Any) -> Any:
        with printing_as(world.rank):
            try:
                return self.fn(world, *args)
            finally:
                if isinstance(sys.stdout, WholeLines):
                    sys.stdout.end()


@contextmanager
def _copied_files(ranks: int) -> Iterator[Path]:
    """A folder for the output of ranks, which is copied into the cell meanwhile."""
    folder = RunFolder(None)
    screen = Screen(folder.path, live=False, tee=ranks)
    ended = threading.Event()
    failed = False

    def copy() -> None:
        while not ended.wait(_COPY_S):
            screen.show()

    copying = run_in_background("output of ranks", copy)
    try:
        yield folder.path
    except BaseException:
        failed = True
        raise
    finally:
        ended.set()
        copying.join()
        screen.close_attempt(failed)
        folder.drop()


class _Redirected:
    """The function of ``run``, called in a process that writes its output into files."""

    def __init__(self, fn: Callable[..., Any], folder: Path) -> None:
        self.fn, self.folder = fn, folder

    def __repr__(self) -> str:
        return repr(self.fn)

    def __call__(self, world: Any, *args: Any) -> Any:
        folder = self.folder / "cell" / "attempt_0" / str(world.rank)
        folder.mkdir(parents=True)
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            name = ("stdout", "stderr")[descriptor - 1]
            file = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        lose_rather_than_raise()
        try:
            return self.fn(world, *args)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
