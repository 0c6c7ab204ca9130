"""The debugger of ranks under pytest, which captures nothing meanwhile; ``--pdb`` has all ranks."""

from __future__ import annotations

import pdb
from typing import Any, TextIO, final

import pytest
from _pytest.config import create_terminal_writer

from echelon.laboratory.debugger_host import DebuggerHost
from echelon.laboratory.rank_commands import EndedRanks, RankCommands
from echelon.laboratory.rank_frames import RankView, stack_of_traceback
from echelon.laboratory.rank_outcomes import RankOutcome, RankOutcomes
from echelon.laboratory.rank_streams import unrouted


@final
class PytestHost(DebuggerHost):
    """pytest, as its own debugger treats it.

    Args:
        config: of the session.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._is_open = False

    @property
    def _capturing(self) -> Any:
        return self._config.pluginmanager.getplugin("capturemanager")

    def enter(self, debugger: pdb.Pdb) -> None:
        """Stop capturing, and tell plugins that a debugger opens."""
        if self._is_open:
            return
        self._is_open = True
        if self._capturing:
            self._capturing.suspend(in_=True)
        self._say("PDB set_trace", "IO-capturing turned off")
        self._config.hook.pytest_enter_pdb(config=self._config, pdb=debugger)

    def leave(self, debugger: pdb.Pdb | None) -> None:
        """Capture again."""
        if not self._is_open:
            return
        self._is_open = False
        if debugger is not None:
            self._say("PDB continue", "IO-capturing resumed")
        if self._capturing:
            self._capturing.resume()
        self._config.hook.pytest_leave_pdb(config=self._config, pdb=debugger)

    def output(self) -> TextIO:
        """The standard output, without what separates ranks."""
        return unrouted()

    def quit_error(self, rank: int | None, place: str) -> BaseException:
        """What ends the session, as it is the custom with pytest."""
        return pytest.exit.Exception("Quitting debugger")

    def ends_run(self, error: BaseException) -> bool:
        """Whether it was the user who has ended the run."""
        return isinstance(error, KeyboardInterrupt | pytest.exit.Exception)

    def _say(self, what: str, capturing: str) -> None:
        writer = create_terminal_writer(self._config, unrouted())
        writer.line()
        is_capturing = self._capturing and self._capturing.is_capturing()
        writer.sep(">", f"{what} ({capturing})" if is_capturing else what)


def _view(rank: int, end: RankOutcome) -> RankView:
    trace = None if end.error is None else end.error.__traceback__
    return RankView(rank, stack_of_traceback(trace), end.what)


def show_ended_ranks(debugger: pdb.Pdb, outcomes: RankOutcomes) -> None:
    """Give a debugger that opens where a rank has failed the commands that show the others."""
    if isinstance(debugger, RankCommands):
        return
    kind = type(debugger)
    debugger.__class__ = type(kind.__name__, (EndedRanks, kind), {})
    assert isinstance(debugger, EndedRanks)
    debugger.ended = [_view(rank, end) for rank, end in sorted(outcomes.ends.items())]
    debugger.stopped_rank = outcomes.primary
    debugger.shows(outcomes.primary)
