"""Where breakpoint() and pdb.set_trace() lead while simulated ranks run."""

import bdb
import pdb
import sys
from types import FrameType

import pytest

import echelon as ec
from echelon.comm.threads import rank_breakpoints


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str | None]]:
    """The functions and lines in which the debugger would have been opened."""
    places: list[tuple[str, int, str | None]] = []

    def open_debugger(frame: FrameType, header: str | None) -> None:
        places.append((frame.f_code.co_name, frame.f_lineno, header))

    monkeypatch.setattr(rank_breakpoints, "open_debugger", open_debugger)
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    return places


def test_each_way_to_ask_for_a_debugger_opens_it_in_the_line_of_the_user(
    opened: list[tuple[str, int, str | None]],
) -> None:
    def main(world: ec.World) -> None:
        breakpoint()
        pdb.set_trace(header="look")
        world.breakpoint()

    before = pdb.set_trace
    ec.run(main, 1)
    line = main.__code__.co_firstlineno
    assert opened == [
        ("main", line + 1, None),
        ("main", line + 2, "look"),
        ("main", line + 3, None),
    ]
    assert pdb.set_trace is before


def test_a_breakpoint_of_one_rank_is_none_of_others(
    opened: list[tuple[str, int, str | None]],
) -> None:
    def main(world: ec.World) -> None:
        world.breakpoint(rank=2)

    ec.run(main, 4)
    assert len(opened) == 1


@pytest.mark.parametrize("rank", [4, -1, "1"])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    def main(world: ec.World) -> None:
        world.breakpoint(rank)

    with pytest.raises(ec.RankError, match="need 0 <= rank < 4"):
        ec.run(main, 4)


def test_the_hook_of_another_debugger_is_respected(
    opened: list[tuple[str, int, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: asked.append("hook"))

    def main(world: ec.World) -> None:
        breakpoint()
        world.breakpoint()

    ec.run(main, 1)
    assert (asked, opened) == (["hook", "hook"], [])


def nothing() -> None:
    """What PYTHONBREAKPOINT names in a test."""
    nothing_was_called.append(True)


nothing_was_called: list[bool] = []


def test_the_variable_of_python_is_respected(
    opened: list[tuple[str, int, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(world: ec.World) -> None:
        breakpoint()
        world.breakpoint()

    monkeypatch.setenv("PYTHONBREAKPOINT", f"{__name__}.nothing")
    ec.run(main, 1)
    assert (nothing_was_called, opened) == ([True, True], [])
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    ec.run(main, 1)
    assert (nothing_was_called, opened) == ([True, True], [])


def stop_there(world: ec.World) -> None:
    world.breakpoint()


def test_ranks_that_are_processes_are_refused_with_what_to_do() -> None:
    with pytest.raises(ec.UnsupportedError, match=r"--world threads.*debugpy\.listen"):
        ec.run(stop_there, 2, "processes")


def stop_in_pdb(world: ec.World) -> None:
    if world.rank == 1:
        breakpoint()
    world.group.barrier()


def test_pdb_without_input_in_a_process_says_what_to_do() -> None:
    with pytest.raises(bdb.BdbQuit) as info:
        ec.run(stop_in_pdb, 2, "processes")
    assert "echelon run --world threads" in "".join(info.value.__notes__)
