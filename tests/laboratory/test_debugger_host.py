"""Where the debugger of ranks speaks with its user."""

import io
import sys

import pytest

from echelon.errors import DebuggerQuit
from echelon.laboratory.debugger_host import DebuggerHost, current_host, hosted_by
from echelon.launch.rank_lines import WholeLines


def test_the_host_of_a_block_is_the_current_one_in_it() -> None:
    before, host = current_host(), DebuggerHost()
    with hosted_by(host):
        assert current_host() is host
    assert current_host() is before


def test_lines_of_the_debugger_are_not_marked_as_those_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", WholeLines(stream, tee=True))
    assert DebuggerHost().output() is stream
    monkeypatch.setattr(sys, "stdout", stream)
    assert DebuggerHost().output() is stream


def test_a_user_ends_a_run_by_quitting_or_an_interrupt() -> None:
    host = DebuggerHost()
    error = host.quit_error(1, "train.py:3")
    assert str(error) == "the run was ended in the debugger, which had stopped rank 1 at train.py:3"
    assert isinstance(error, DebuggerQuit)
    assert host.ends_run(error)
    assert host.ends_run(KeyboardInterrupt())
    assert not host.ends_run(ValueError())
