"""The clock stands while another debugger has stopped a rank."""

import cmd
import io
import pdb
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.comm.threads.debugger_watch import DebuggerWatch
from echelon.comm.threads.running_time import running_s


class SlowKeys(io.StringIO):
    """A user who thinks before each command."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self._seconds = seconds

    def readline(self, size: int | None = -1, /) -> str:
        time.sleep(self._seconds)
        return super().readline()


@pytest.mark.slow
def test_a_rank_in_pdb_that_was_opened_by_hand_is_not_late() -> None:
    def main(world: ec.World) -> float:
        total = torch.ones(1)
        if world.rank == 1:
            debugger = pdb.Pdb(stdin=SlowKeys("p total\nc\n", 1.0), stdout=io.StringIO())
            debugger.set_trace()
            total += 1
        world.group.all_reduce(total)
        return total.item()

    assert ec.run(main, 3, timeout=0.6) == [4.0] * 3


class Waiting(io.StringIO):
    """A user who gives a command when it is time."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may_go_on = threading.Event(), threading.Event()

    def readline(self, size: int | None = -1, /) -> str:
        self.entered.set()
        self.may_go_on.wait()
        return "c\n"


def runs() -> bool:
    before = running_s()
    time.sleep(0.02)
    return running_s() > before


def test_the_clock_stands_in_pdb_in_the_block_only() -> None:
    def debug(keys: Waiting) -> threading.Thread:
        def main() -> None:
            pdb.Pdb(stdin=keys, stdout=io.StringIO()).set_trace()
            keys.may_go_on.wait()

        thread = threading.Thread(target=main)
        thread.start()
        assert keys.entered.wait(20)
        return thread

    within, after = Waiting(), Waiting()
    original = cmd.Cmd.cmdloop
    with DebuggerWatch() as watch:
        watch.look()
        assert runs()
        thread = debug(within)
        assert not runs()
        within.may_go_on.set()
        thread.join()
        assert runs()
    assert cmd.Cmd.cmdloop is original
    thread = debug(after)
    assert runs()
    after.may_go_on.set()
    thread.join()


def attach(monkeypatch: pytest.MonkeyPatch, is_attached: Callable[[], bool]) -> None:
    debugpy = SimpleNamespace(is_client_connected=is_attached)
    monkeypatch.setitem(sys.modules, "pydevd", sys)
    monkeypatch.setitem(sys.modules, "debugpy", debugpy)  # type: ignore[arg-type]


def test_the_clock_stands_for_a_rank_that_is_stopped_in_its_first_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The thread that has started it may not know which it is yet, as debugpy stops that as well.
    code: dict[str, Any] = {}
    wait = "def _do_wait_suspend(go_on): go_on.wait()"
    exec(compile(wait, "/site-packages/pydevd.py", "exec"), code)
    go_on = threading.Event()
    attach(monkeypatch, lambda: True)
    with DebuggerWatch():
        thread = threading.Thread(target=code["_do_wait_suspend"], args=(go_on,))
        thread.start()
        deadline = time.monotonic() + 20
        while runs():
            assert time.monotonic() < deadline
        go_on.set()
        thread.join()
        while not runs():
            assert time.monotonic() < deadline


def test_stacks_are_read_only_where_debugpy_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()

    def frames() -> dict[int, Any]:
        looked.set()
        return {}

    monkeypatch.setattr(sys, "_current_frames", frames)
    attached: list[bool] = []
    attach(monkeypatch, lambda: bool(attached))
    with DebuggerWatch() as watch:
        watch.look()
        assert not looked.wait(0.15)
        attached.append(True)
        watch.look()
        assert looked.wait(20)
