"""What becomes of threads beside the one that runs a script, when the script ends."""

import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from echelon.process import time_limits
from echelon.process.background_threads import (
    answer_of,
    end_all,
    run_in_background,
    run_on_idle_thread,
)

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


FAILED_BACKWARD = """
import torch
import echelon as ec

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("in backward")

def main(world):
    weights = [torch.ones(8, requires_grad=True) for _ in range(200)]
    for weight in weights:
        weight.register_hook(lambda grad: grad)
    loss = sum((Fails.apply(weight).sin() * weight).sum() for weight in weights)
    loss.backward()

try:
    ec.run(main, 4)
except KeyError:
    pass
"""


@pytest.mark.slow
def test_a_script_that_has_caught_a_failed_backward_ends_with_its_own_code() -> None:
    command = [sys.executable, "-c", FAILED_BACKWARD]
    codes = [subprocess.run(command, timeout=60, check=False).returncode for _ in range(3)]
    assert codes == [0] * 3


def test_a_thread_that_ends_by_itself_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    def work() -> None:
        time.sleep(0.2)
        ended.append(True)

    thread = run_in_background("works", work)
    assert (thread.name, thread.daemon) == ("works", True)
    monkeypatch.setattr(time_limits, "END_THREADS_S", 20.0)
    end_all()
    assert ended == [True]


def test_a_thread_that_goes_on_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []

    def work() -> None:
        try:
            while True:
                time.sleep(0.01)
        except BaseException as error:
            told.append(type(error))

    thread = run_in_background("goes on", work)
    monkeypatch.setattr(time_limits, "END_THREADS_S", 0.05)
    monkeypatch.setattr(time_limits, "END_TOLD_THREADS_S", 20.0)
    end_all()
    assert not thread.is_alive()
    assert told == [SystemExit]


def test_a_thread_that_waits_for_ever_keeps_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    event = threading.Event()

    def wait() -> None:
        with suppress(SystemExit):  # which comes when it goes on
            event.wait()

    thread = run_in_background("waits", wait)
    start_s = time.monotonic()
    monkeypatch.setattr(time_limits, "END_THREADS_S", 0.05)
    monkeypatch.setattr(time_limits, "END_TOLD_THREADS_S", 0.05)
    end_all()
    assert time.monotonic() - start_s < 5
    assert thread.is_alive()
    event.set()
    thread.join()


class Stoppable:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.thread = run_in_background("waits", self.event.wait, stop=self.stop)

    def stop(self) -> None:
        self.event.set()


def test_a_thread_that_waits_for_work_is_asked_to_end_at_once() -> None:
    waiter = Stoppable()
    run_on_idle_thread(lambda: None)
    start_s = time.monotonic()
    end_all()
    assert time.monotonic() - start_s < time_limits.END_THREADS_S
    assert not waiter.thread.is_alive()


def test_calls_beside_the_script_share_threads() -> None:
    numbers = [answer_of(threading.get_ident, 20.0)[0] for _ in range(20)]
    time.sleep(0.05)
    assert len(set(numbers)) < 5
    with pytest.raises(KeyError):
        answer_of(lambda: {}[0], 20.0)
    event = threading.Event()
    assert answer_of(event.wait, 0.01) == []
    event.set()
