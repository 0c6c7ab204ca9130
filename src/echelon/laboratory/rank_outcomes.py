"""How each rank of a test ended, with which failure the test ends, and how a report shows it.

[Note: whose failure]
A rank that fails frees the others, which then raise ``RankFailed`` or the like. That is no failure
of theirs. A rank that skips does the same. So a test fails with what no rank has raised, such as
Ctrl-C; otherwise with the first error of a rank that is not about other ranks; otherwise with a
skip; otherwise with the error about ranks that wait, of the lowest rank.
"""

from __future__ import annotations

import sys
import threading
import traceback
import unittest
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, final

import pytest
from _pytest._code.code import ReprTraceback

from echelon.errors import CommError, EchelonError
from echelon.errors.message_text import ranks_text
from echelon.process.background_threads import tell_to_end
from echelon.process.thread_frames import current_frames

_PACKAGE = Path(__file__).parent.parent
_MOST_SHOWN = 2  # failures of other ranks at other places, each with its traceback
_MOST_ROWS = 16
_WIDTH = 160  # characters of one row
# What pytest raises where a test says how it ends.
_ENDINGS = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)


class RankExited(EchelonError):
    """Raised in place of ``SystemExit``, which would count as the proper end of a rank.

    Attributes:
        rank: the rank that called ``sys.exit``.
    """

    def __init__(self, rank: int, code: object) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} called sys.exit({code!r:.80})")


class EndKind(Enum):
    """How a rank ended."""

    FINISHED = "it came to the end of the test"
    FAILED = "it raised an error of its own"
    FREED = "it raised an error about other ranks"
    LEFT = "it skipped the test, or failed as it expected to"
    STUCK = "it did not end"


@final
@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        kind: in general.
        name: the name of the class of what it raised.
        message: the message of that.
        place: the line of the test, with a colon; empty if that is not known.
        error: what the rank raised, if it is of this process.
        shown: how pytest shows the error, if the rank is a process of its own.
    """

    kind: EndKind
    name: str = ""
    message: str = ""
    place: str = ""
    error: BaseException | None = None
    shown: Any = None

    @classmethod
    def of_error(cls, error: BaseException, test_path: Path) -> RankOutcome:
        """The end of a rank that raised."""
        kind = EndKind.FAILED
        if isinstance(error, _ENDINGS):
            kind = EndKind.LEFT
        elif isinstance(error, CommError):
            kind = EndKind.FREED
        place = _place(traceback.extract_tb(error.__traceback__), test_path)
        return cls(kind, type(error).__name__, str(error), place, error)

    @property
    def what(self) -> str:
        """How it ended, in one line."""
        if not self.name:
            return "finished" if self.kind is EndKind.FINISHED else "did not end"
        first, *_ = [*self.message.splitlines(), ""]
        return f"{self.name}: {first}" if first else self.name

    def outcome(self) -> BaseException | None:
        """What pytest itself raises for this end, which no process can send to another."""
        kinds: dict[str, Any] = {
            "Skipped": partial(pytest.skip.Exception, _use_item_location=True),
            "SkipTest": partial(pytest.skip.Exception, _use_item_location=True),
            "XFailed": pytest.xfail.Exception,
            "Failed": partial(pytest.fail.Exception, pytrace=False),
            "Exit": pytest.exit.Exception,
            "SystemExit": SystemExit,
        }
        kind = kinds.get(self.name)
        outcome: BaseException | None = None if kind is None else kind(self.message)
        return outcome


@final
class RankOutcomes:
    """How the ranks of one test ended.

    Attributes:
        size: how many ranks there are.
        path: the file of the test.
        ends: how each rank ended, as far as it did.
        threads: the thread of each rank that is one.
        has_started: whether ranks were started at all.
        primary: the rank whose error the test fails with; None if it is no rank's.
        error: that error.
    """

    def __init__(self, size: int, path: Path) -> None:
        self.size, self.path = size, path
        self.ends: dict[int, RankOutcome] = {}
        self.threads: dict[int, threading.Thread] = {}
        self.has_started = False
        self.primary: int | None = None
        self.error: BaseException | None = None

    def finish(self, rank: int) -> None:
        """Record that a rank came to the end of the test."""
        self.ends.setdefault(rank, RankOutcome(EndKind.FINISHED))

    def fail(self, rank: int, error: BaseException) -> None:
        """Record what a rank of this process raised."""
        # One that was told to end is known as stuck.
        self.ends.setdefault(rank, RankOutcome.of_error(error, self.path))

    def end_others(self) -> None:
        """After a failure: record where the other ranks are, and tell those that run to end."""
        frames = current_frames()
        for rank in sorted(set(range(self.size)) - self.ends.keys()):
            place = ""
            if thread := self.threads.get(rank):
                if frame := frames.get(thread.ident or 0):
                    place = _place(traceback.extract_stack(frame), self.path)
                tell_to_end(thread)  # or it would slow down all tests that follow
            self.ends[rank] = RankOutcome(EndKind.STUCK, place=place)

    def choose(self, error: BaseException, rank: int | None = None) -> BaseException:
        """The error that the test fails with. See [Note: whose failure].

        Args:
            error: what ``run`` raised.
            rank: the rank that ``run`` says it is of, if that is a process.
        """
        if rank is None:
            rank = self._rank_of(error)
        self.primary = self._primary(rank)
        self.error = error
        if self.primary is not None and self.primary in self.ends:
            end = self.ends[self.primary]
            self.error = end.error or end.outcome() or error
            if end.error is None and self.primary != rank:  # its error is in another process
                self.error = end.outcome() or pytest.fail.Exception(end.what, pytrace=False)
        if isinstance(self.error, _ENDINGS):
            self._name_ranks(self.error)
        return self.error

    def _rank_of(self, error: BaseException) -> int | None:
        """The rank that raised an error; None if no rank has."""
        if isinstance(error, RankExited):
            return error.rank
        errors = {rank: end.error for rank, end in sorted(self.ends.items())}
        same = [rank for rank, other in errors.items() if other is error]
        # Some errors are copied for each rank, and only the copies have tracebacks.
        alike = [
            rank
            for rank, other in errors.items()
            if type(other) is type(error) and str(other) == str(error)
        ]
        return next(iter(same or alike), None)

    def _primary(self, rank: int | None) -> int | None:
        if rank is None or rank not in self.ends:
            return rank
        kind = self.ends[rank].kind
        for better in (EndKind.FAILED, EndKind.LEFT):
            if kind is better:
                return rank
            if ranks := self._ranks(better):
                return ranks[0]
        return rank

    def _ranks(self, kind: EndKind) -> list[int]:
        return sorted(rank for rank, end in self.ends.items() if end.kind is kind)

    def _name_ranks(self, error: Any) -> None:
        """Let the reason of a skip say which ranks gave it, unless all did."""
        ranks = self._ranks(EndKind.LEFT)
        if isinstance(getattr(error, "msg", None), str) and len(ranks) < self.size:
            error.msg = f"{ranks_text(ranks)} of {self.size}: {error.msg}"
            error.args = (error.msg,)

    def leave_out_echelon(self) -> None:
        """Remove what happened inside of echelon from all tracebacks, also for the debugger."""
        if self.primary is None and self.error is not None:
            self.error.__traceback__ = None  # of the thread that waits for the ranks
        errors = [self.error, *(end.error for end in self.ends.values())]
        for error in {id(error): error for error in errors if error is not None}.values():
            leave_out_echelon(error, self.path)

    def describe(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Say in the report of a failed test which rank failed, and how the others ended."""
        shown: Any = report.longrepr
        if report.outcome != "failed" or not hasattr(shown, "addsection"):
            return
        end = None if self.primary is None else self.ends.get(self.primary)
        if end is not None and end.shown is not None:
            shown = end.shown
        if self.primary is not None and hasattr(shown, "chain"):
            heading = ReprTraceback(reprentries=[], extraline=None, style="long")
            name = f"rank {self.primary} of {self.size}:"
            shown = type(shown)([(heading, None, name), *shown.chain])
        if self.primary is not None and shown.reprcrash is not None:
            shown.reprcrash.message = f"rank {self.primary}: {shown.reprcrash.message}"
        for name, text in self._sections(item):
            shown.addsection(name, text)
        report.longrepr = shown

    def _sections(self, item: pytest.Item) -> Iterator[tuple[str, str]]:
        """Failures of other ranks at other places, and a table of all ranks."""
        places = {self.ends[rank].place for rank in (self.primary,) if rank in self.ends}
        for rank in self._ranks(EndKind.FAILED):
            end = self.ends[rank]
            if rank == self.primary or end.place in places:
                continue
            if len(places) > _MOST_SHOWN:
                break
            places.add(end.place)
            shown = end.shown
            if end.error is not None and end.error.__traceback__ is not None:
                shown = item.repr_failure(pytest.ExceptionInfo.from_exception(end.error))
            yield f"rank {rank} of {self.size} failed, too", str(shown or end.what)
        if self.size > 1:
            rows = {rank: f"{end.place}{end.what}" for rank, end in sorted(self.ends.items())}
            yield "all ranks", "\n".join(_table(rows))


def leave_out_echelon(error: BaseException, test_path: Path) -> None:
    """Remove frames of echelon from the traceback of an error, and from those of its causes."""
    notes = [_shortened(note, test_path) for note in getattr(error, "__notes__", [])]
    error.__notes__ = [note for note in notes if note]
    seen: BaseException | None = error
    while seen is not None:
        packages = {_PACKAGE}
        if isinstance(seen, EchelonError) and (torch := sys.modules.get("torch")):
            packages.add(Path(str(torch.__file__)).parent)  # which only passes it on
        seen.__traceback__ = _without_frames(seen.__traceback__, packages, test_path)
        seen = seen.__cause__


def _without_frames(
    trace: TracebackType | None, packages: Collection[Path], test_path: Path
) -> TracebackType | None:
    """A traceback without the frames of some packages, unless the test is one of them."""
    entries = []
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path == test_path or not any(package in path.parents for package in packages):
            entries.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _shortened(note: str, test_path: Path) -> str:
    """A note on an error, without what the report says at its head, and without our frames."""
    if note.startswith("raised on rank "):
        return ""
    ours = (str(_PACKAGE), threading.__file__)
    return "\n".join(
        line
        for line in note.splitlines()
        if not line.strip().startswith(ours) or line.strip().startswith(f"{test_path}:")
    )


def _place(frames: Iterable[traceback.FrameSummary], test_path: Path) -> str:
    """The innermost line of the test among frames; empty if there is none."""
    lines = [frame.lineno for frame in frames if frame.filename == str(test_path)]
    return f"{test_path.name}:{lines[-1]}: " if lines else ""


def _table(rows: dict[int, str]) -> Iterator[str]:
    """A line for each rank, or for several that ended alike."""
    alike: dict[str, list[int]] = {}
    for rank, row in rows.items():
        alike.setdefault(row, []).append(rank)
    for row, ranks in list(alike.items())[:_MOST_ROWS]:
        yield f"{ranks_text(ranks)}: {row}"[:_WIDTH]
    if len(alike) > _MOST_ROWS:
        yield f"and {len(alike) - _MOST_ROWS} more"
