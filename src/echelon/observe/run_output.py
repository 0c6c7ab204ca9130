"""What rank 0 writes and shows of a run, which neither ends nor delays the training.

[Note: what only observes]
A disk becomes full, a folder goes away, the terminal is closed. None of this is a reason to lose a
training of days. So each kind of output that fails is said once, in a warning, and is tried again
with the next line: it goes on when there is space again. The page is drawn on a thread beside the
training, because a long run takes seconds to draw, and nobody waits for it but the end of the run.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, final

from echelon.observe.metrics import MetricsWriter
from echelon.observe.progress import Progress
from echelon.observe.report import write_report
from echelon.observe.run_info import RunInfo
from echelon.process.background_threads import run_in_background

FIRST_PAGE_S, PAGE_S = 10.0, 30.0  # seconds before the page is written first, and again
_TIMES_OF_A_PAGE = 100  # at least so much time passes as the last page took, times this
_LAST_PAGE_S = 60.0  # how long the end of a run waits for a page that is being drawn
_Result = TypeVar("_Result")


@final
class RunOutput:
    """The files of a run and its line on the terminal. See [Note: what only observes].

    Args:
        folder: of the run; None: nothing is written or shown.
        is_continued: whether the folder has the lines of an attempt before this one.
        info: what the script says of the run.
    """

    def __init__(self, folder: Path | None, is_continued: bool, info: RunInfo) -> None:
        self._folder, self._is_continued, self._info = folder, is_continued, info
        self._failed: set[str] = set()
        self._writer: MetricsWriter | None = None
        self._start: Mapping[str, Any] | None = None  # which is not written yet
        self._progress: Progress | None = None
        self._page: threading.Thread | None = None
        self._page_error: Exception | None = None
        self._page_due_s = time.perf_counter() + FIRST_PAGE_S

    @property
    def is_active(self) -> bool:
        """Whether this rank writes."""
        return self._folder is not None

    def open(self) -> None:
        """Show the line."""
        if self._folder is not None:
            progress = Progress(self._info.total_steps, unit=self._info.unit)
            self._progress = self._try("the progress", progress.__enter__)

    def write(self, kind: str, **values: Any) -> None:
        """Write a line of metrics, after those that must stand before it."""
        if self._folder is None:
            return
        if kind == "start":  # without it the others are no run
            self._start = values
        folder = self._folder
        self._try("metrics.jsonl", lambda: self._write(folder, kind, values))

    def update(self, step: int, **values: Any) -> None:
        """Show the state after ``step`` steps, as ``Progress.update``, and draw the page if due."""
        if self._progress is not None:
            progress = self._progress
            self._try("the progress", lambda: progress.update(step, **values))
        self._draw_when_due()

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        if self._progress is not None:
            progress = self._progress
            self._try("the progress", lambda: progress.note(text))

    def write_file(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file of the folder."""
        if self._folder is not None:
            path = self._folder / name
            self._try(name, lambda: write(path))

    def close(self) -> None:
        """Close the files, remove the live line, and draw the page."""
        if self._folder is None:
            return
        for what, ended in (("metrics.jsonl", self._writer), ("the progress", self._progress)):
            if ended is not None:
                self._try(what, lambda ended=ended: ended.__exit__(None, None, None))  # type: ignore[misc]
        self._writer = None
        if self._page is not None:
            self._page.join(_LAST_PAGE_S)
        folder = self._folder
        self._report_page_error()
        page = self._try("report.html", lambda: write_report(folder))
        if page is not None:
            self.say(f"the report of this run is {page}")

    def _write(self, folder: Path, kind: str, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._writer = MetricsWriter(folder / "metrics.jsonl", append=self._is_continued)
        if self._start is not None:
            self._writer.write("start", **self._start)
            self._start = None
        if kind != "start":
            self._writer.write(kind, **values)

    def _draw_when_due(self) -> None:
        if self._folder is None or time.perf_counter() < self._page_due_s:
            return
        if self._page is None or not self._page.is_alive():
            self._report_page_error()
            self._page = run_in_background("page of a run", self._draw, self._folder)

    def _draw(self, folder: Path) -> None:
        """Draw the page of a run that goes on."""
        start_s = time.perf_counter()
        try:
            write_report(folder, live=True)
        except Exception as error:  # which the thread of the training warns of
            self._page_error = error
        now_s = time.perf_counter()
        self._page_due_s = now_s + max(PAGE_S, _TIMES_OF_A_PAGE * (now_s - start_s))

    def _report_page_error(self) -> None:
        if (error := self._page_error) is not None:
            self._page_error = None
            self._warn("report.html", error)

    def _try(self, what: str, action: Callable[[], _Result]) -> _Result | None:
        """The result of ``action``; None after it has failed, of which a warning tells once."""
        try:
            return action()
        except Exception as error:  # See [Note: what only observes].
            self._warn(what, error)
            return None

    def _warn(self, what: str, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            warnings.warn(
                f"{what} of this run could not be written ({type(error).__name__}: {error}). "
                f"Training goes on, and so does the recording when that is possible again; "
                f"the folder is {self._folder}",
                RuntimeWarning,
                stacklevel=5,
            )
