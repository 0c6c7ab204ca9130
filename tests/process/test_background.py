"""What becomes of threads beside the one that runs a script, when the script ends."""

import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from echelon.process.background import end_all, run_beside

LEFT_BEHIND = """
import sys
import torch
import echelon as ec

def main(world):
    if world.rank == 0:
        raise KeyError("of rank 0")
    while True:  # never communicates, so it does not hear of it
        torch.ones(300, 300).mul(2).sum().item()

try:
    ec.run(main, 2)
except KeyError as error:
    assert "left behind: rank 1" in "".join(error.__notes__), error.__notes__
sys.exit(5)
"""


@pytest.mark.slow
def test_a_script_that_leaves_a_rank_behind_which_computes_ends_with_its_own_code() -> None:
    found = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stderr) == (5, "")


def test_a_thread_that_ends_by_itself_is_waited_for() -> None:
    ended: list[bool] = []

    def work() -> None:
        time.sleep(0.2)
        ended.append(True)

    thread = run_beside("works", work)
    assert (thread.name, thread.daemon) == ("works", True)
    end_all(patience_s=20.0)
    assert ended == [True]


def test_a_thread_that_goes_on_is_told_to_end() -> None:
    told: list[type[BaseException]] = []

    def work() -> None:
        try:
            while True:
                time.sleep(0.01)
        except BaseException as error:
            told.append(type(error))

    thread = run_beside("goes on", work)
    end_all(patience_s=0.05, told_s=20.0)
    assert not thread.is_alive()
    assert told == [SystemExit]


def test_a_thread_that_waits_for_ever_keeps_no_script() -> None:
    event = threading.Event()

    def wait() -> None:
        with suppress(SystemExit):  # which comes when it goes on
            event.wait()

    thread = run_beside("waits", wait)
    start_s = time.monotonic()
    end_all(patience_s=0.05, told_s=0.05)
    assert time.monotonic() - start_s < 5
    assert thread.is_alive()
    event.set()
    thread.join()
