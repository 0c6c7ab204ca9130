"""Threads of a rank exchange its own functions and classes with processes, whoever has the turn."""

import sys
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from echelon.launch.program import Program
from echelon.launch.simulated_job import run_threads

SCRIPT = """
import threading
import time
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler

import echelon as ec

world = ec.init()

class Item:
    def __init__(self, number):
        self.number = number

def make(number):
    return Item(number + world.rank)

def exchange():
    time.sleep(0.4)  # the last rank has its turn then
    message = bytes(ForkingPickler.dumps((Item(1), make, Item)))
    item, function, kind = ForkingPickler.loads(message)
    print(type(item) is Item, function is make, kind is Item, flush=True)
    with get_context("fork").Pool(1) as pool:
        item = pool.apply(make, (10,))
        print(type(item) is Item, item.number - world.rank, flush=True)

if __name__ == "__main__":
    thread = threading.Thread(target=exchange)
    thread.start()
    world.group.barrier()
    if world.rank == 2:
        end_s = time.monotonic() + 1
        while time.monotonic() < end_s:
            pass
    thread.join()
"""


@pytest.mark.slow
def test_threads_write_and_read_what_is_of_their_rank_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["echelon"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = threading.Thread.start, ForkingPickler.loads
    code = run_threads(Program(str(script)), [], 3, 30.0)
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    lines = sorted(printed.out.splitlines())
    assert lines == ["True 10"] * 3 + ["True True True"] * 3
    assert (threading.Thread.start, ForkingPickler.loads) == before
    assert not hasattr(ForkingPickler, "reducer_override")
