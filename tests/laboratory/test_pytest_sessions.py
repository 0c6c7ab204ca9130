"""Sessions with workers, a debugger, interrupts and time limits, in processes of their own."""

import re
import signal
import subprocess
import sys

import pytest

from tests.laboratory.ranked_tests import PLUGIN, is_in_order
from tests.processes import becomes_true

pytest_plugins = ["pytester"]

TWO_RANKS = """
import pytest, torch

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(4))
def test_it(world, number):
    print("number", number)
    assert (world.rank, number) != (1, 2)
    world.group.barrier()
"""


@pytest.mark.slow
def test_workers_of_xdist_report_as_one_process_does(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=TWO_RANKS)
    result = pytester.runpytest_subprocess("-p", PLUGIN, "-n", "2")
    result.assert_outcomes(passed=3, failed=1)
    is_in_order(
        result,
        "rank 1 of 2:",
        "*- all ranks -*",
        "*Captured stdout rank 1 call*",
        "number 2",
        "FAILED test_it.py::test_it[[]2[]] - rank 1: *",
    )


def debugged(
    pytester: pytest.Pytester,
    source: str,
    *arguments: str,
    commands: str = "p ('rank', world.rank)\nc\n",
) -> str:
    """What a session prints whose debugger is told to print the rank, and to go on."""
    path = pytester.makepyfile(source)
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-q", *arguments, str(path)]
    done = subprocess.run(command, input=commands, capture_output=True, text=True, timeout=100)
    return done.stdout


@pytest.mark.slow
def test_the_debugger_opens_in_the_line_and_the_rank_that_failed(pytester: pytest.Pytester) -> None:
    output = debugged(pytester, TWO_RANKS, "--pdb")
    assert "-> assert (world.rank, number) != (1, 2)\n(Pdb rank 1) ('rank', 1)" in output
    assert "1 failed, 3 passed" in output


@pytest.mark.slow
def test_a_breakpoint_stops_one_rank_and_output_is_apart_afterwards(
    pytester: pytest.Pytester,
) -> None:
    source = """
import pytest

@pytest.mark.ranks(2)
def test_it(world):
    if world.rank == 1:
        breakpoint()
    world.group.barrier()
    print("after", world.rank)
    world.group.barrier()
    assert False
"""
    output = debugged(pytester, source)
    assert "(Pdb rank 1) ('rank', 1)" in output
    assert "PDB set_trace (IO-capturing turned off)" in output
    assert re.search("Captured stdout rank 0 call -+\nafter 0\n", output)
    assert re.search("Captured stdout rank 1 call -+\nafter 1\n", output)


@pytest.mark.slow
def test_the_debugger_shows_all_ranks_where_one_has_failed_and_at_a_breakpoint(
    pytester: pytest.Pytester,
) -> None:
    source = """
import pytest, torch

@pytest.mark.ranks(2)
def test_it(world):
    value = world.rank + 5
    world.breakpoint(rank=1)
    assert world.rank == 0
    world.group.barrier()
"""
    commands = "rank 0\np value\nc\nrank 0\np value\nranks\nc\n"
    output = debugged(pytester, source, "--pdb", commands=commands)
    assert output.count("(Pdb rank 0) 5\n") == 2
    table = output.split("(Pdb rank 0)    rank")[1].splitlines()
    assert table[1].startswith("->    0  test_it ")
    assert ".py:8  RankFailed: rank 1 raised AssertionError" in table[1]
    assert ".py:7  AssertionError" in table[2]
    assert "1 failed" in output


@pytest.mark.slow
def test_quitting_the_debugger_of_a_rank_ends_the_session(pytester: pytest.Pytester) -> None:
    source = """
import pytest

@pytest.mark.ranks(2)
def test_it(world):
    breakpoint()
    world.group.barrier()

def test_more():
    assert False
"""
    output = debugged(pytester, source, commands="q\n")
    assert "Exit: Quitting debugger" in output
    assert output.count("(Pdb rank") == 1
    assert "no tests ran" in output


@pytest.mark.slow
@pytest.mark.parametrize("world", ["threads", "processes"])
def test_an_interrupt_ends_ranks_that_never_end(pytester: pytest.Pytester, world: str) -> None:
    path = pytester.makepyfile(
        """
import pathlib, time
import pytest

@pytest.mark.ranks(2)
def test_it(world):
    pathlib.Path("runs").touch()
    while True:
        time.sleep(0.01)
"""
    )
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, f"--echelon-world={world}", str(path)]
    session = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert becomes_true((pytester.path / "runs").exists, 60.0)
    session.send_signal(signal.SIGINT)
    output, _ = session.communicate(timeout=30)
    assert session.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in output


@pytest.mark.slow
def test_a_time_limit_says_where_each_rank_was(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="""
import time
import pytest
import echelon.laboratory.rank_test

@pytest.mark.ranks(2)
@pytest.mark.timeout(1)
def test_it(world):
    while True: time.sleep(0.01)

def test_after(): pass
"""
    )
    result = pytester.runpytest_subprocess("-p", PLUGIN)
    result.assert_outcomes(failed=1, passed=1)
    is_in_order(result, "E*Timeout*", "ranks 0, 1: test_it.py:8: did not end")
