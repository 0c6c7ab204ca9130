"""The debugger of ranks under pytest; ``test_pytest_sessions`` has whole sessions."""

import io
import pdb
from pathlib import Path

import pytest

from echelon.laboratory.pytest_debugger import PytestHost, show_ended_ranks
from echelon.laboratory.rank_commands import EndedRanks
from echelon.laboratory.rank_outcomes import RankOutcomes


def test_a_debugger_of_pytest_gets_the_commands_of_ranks() -> None:
    outcomes = RankOutcomes(2, Path(__file__))
    try:
        raise ValueError("of rank 1")
    except ValueError as error:
        outcomes.fail(1, error)
        outcomes.finish(0)
        outcomes.choose(error)
    output = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO(), stdout=output)
    show_ended_ranks(debugger, outcomes)
    assert isinstance(debugger, EndedRanks)
    assert debugger.prompt == "(Pdb rank 1) "
    debugger.onecmd("ranks")
    _, first, second = output.getvalue().splitlines()
    assert first.split() == ["0", "finished"]
    assert second.split()[:2] == ["->", "1"]
    assert second.endswith("ValueError: of rank 1")


def test_quitting_ends_a_session_of_pytest(pytestconfig: pytest.Config) -> None:
    host = PytestHost(pytestconfig)
    error = host.quit_error(0, "")
    assert isinstance(error, pytest.exit.Exception)
    assert host.ends_run(error)
    assert not host.ends_run(AssertionError())


def test_a_host_that_was_not_entered_leaves_captures_alone(pytestconfig: pytest.Config) -> None:
    manager = pytestconfig.pluginmanager.getplugin("capturemanager")
    before = manager.is_capturing()
    PytestHost(pytestconfig).leave(None)
    assert manager.is_capturing() == before
