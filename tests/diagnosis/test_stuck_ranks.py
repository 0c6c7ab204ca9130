"""A rank that hangs where nobody waits for it is named, and its job ends; a slow one is not."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.diagnosis.flight_recorder import Phase, RankStatus
from echelon.diagnosis.stuck_ranks import (
    ExitSign,
    ExitStage,
    StuckRankRule,
    seconds_to_follow,
    stuck_rank_error,
)
from echelon.errors import CommTimeout
from tests.cli.jobs import Job

TIMEOUT_S = 1.0
RUNNING, CLOSED, LEAVING, ENDED = (ExitSign(stage=stage) for stage in ExitStage)

SCRIPT = """
import atexit, os, signal, sys, threading, time, torch
import echelon as ec

def sleeps():
    time.sleep(1000)

how, backend = sys.argv[1:]
with ec.init(backend, timeout=3.0) as world:
    weight = torch.ones(3, requires_grad=True)
    (weight * (world.rank + 1)).sum().backward()
    # On a busy machine the first backward of one rank may end seconds after that of the other.
    world.group.all_reduce(weight.grad, async_op=True).wait(60)
    assert weight.grad.tolist() == [3.0] * 3
    if world.rank == 1:
        match how:
            case "return": sleeps()
            case "exit handler": atexit.register(sleeps)
            case "thread": threading.Thread(target=sleeps, name="uploads").start()
            case "stopped": os.kill(os.getpid(), signal.SIGSTOP)
if world.rank == 0:
    open(__file__ + ".left", "w").close()
"""
SLEEPS = "sleeps or waits outside communication"
DOES = {
    "return": SLEEPS,
    "exit handler": f"has ended its script, but {SLEEPS} in an exit handler",
    "thread": "has ended its script, but waits for its thread 'uploads'",
    "stopped": "is stopped by SIGSTOP or a debugger",
}


def hangs_after_its_last_call(world: ec.World, seconds: float) -> None:
    total = torch.tensor([world.rank + 1.0])
    world.group.all_reduce(total)
    if world.rank == 1:
        time.sleep(seconds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_rank_that_hangs_after_the_others_have_returned_is_named(kind: str) -> None:
    ec.run(hangs_after_its_last_call, 3, kind, args=(0.0,))  # starts the fork server
    start_s = time.monotonic()
    with pytest.raises(CommTimeout, match=r"the end of the job waited 1\.0 s for rank 1") as info:
        ec.run(hangs_after_its_last_call, 3, kind, args=(4.0,), timeout=TIMEOUT_S)
    assert time.monotonic() - start_s < TIMEOUT_S + 10
    assert info.value.stuck == {1: f"at step 0 {SLEEPS}"}
    assert re.search(
        r"  its last call: all_reduce.* in hangs_after_its_last_call\n", str(info.value)
    )
    assert str(info.value).endswith("in hangs_after_its_last_call")
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join()


def works_on_alone(world: ec.World) -> int:
    """Rank 1 trains on after the others have returned, and takes longer than the timeout."""
    world.group.barrier()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8 if world.rank == 1 else 0):
        time.sleep(0.3)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return world.step


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_rank_that_goes_on_making_steps_raises_no_alarm(kind: str) -> None:
    # So much longer than a step that a busy machine, too, makes one in this time.
    assert ec.run(works_on_alone, 2, kind, timeout=2.0) == [0, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "backend"),
    [("return", "gloo"), ("exit handler", "shm"), ("thread", "gloo"), ("stopped", "shm")],
)
def test_a_rank_of_a_script_that_hangs_on_its_way_out_is_named(
    how: str, backend: str, tmp_path: Path
) -> None:
    with Job(tmp_path, SCRIPT, how, backend) as job:
        code, _, lines = job.end()
        assert job.processes() == {}
    assert code == 1
    expected = f"rank 1 at step 0 {DOES[how]}; others have left, and it had 3.0 s to follow"
    assert lines[0] == expected
    assert lines[1].startswith("  its last call: all_reduce(sum) float32[3]")
    if how in ("return", "thread"):
        assert "    " + str(tmp_path / "job.py") + ":6 in sleeps" in lines
    # 3 s to follow, and the time in which a busy machine ends two processes; it sleeps for 1,000 s.
    assert time.time() - (tmp_path / "job.py.left").stat().st_mtime < 60


@pytest.mark.slow
def test_under_torchrun_such_a_rank_ends_itself_and_says_why(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    with Job(tmp_path, SCRIPT, "return", "gloo", launcher=torchrun) as job:
        code, _, lines = job.end()
    assert code == 1
    assert f"rank 1 at step 0 {SLEEPS}; others have left, and it had 3.0 s to follow" in lines


SLOW_AT_BOTH_ENDS = """
import atexit, time
import echelon as ec
from echelon.diagnosis.rank_monitor import RankMonitor

set_timeout = RankMonitor.set_timeout

def set_late(self, seconds):
    time.sleep(1.0)
    set_timeout(self, seconds)

RankMonitor.set_timeout = set_late
with ec.init("shm", timeout=60.0) as world:
    if world.rank == 1:
        atexit.register(time.sleep, 7.0)
"""


@pytest.mark.slow
def test_a_rank_may_be_slow_to_end_though_it_has_said_its_timeout_late(tmp_path: Path) -> None:
    with Job(tmp_path, SLOW_AT_BOTH_ENDS) as job:
        code, _, lines = job.end()
    assert (code, lines) == (0, [])


@pytest.mark.parametrize(("timeouts", "limit"), [((), None), ((0.0,), None), ((0.0, 3.0), 3.0)])
def test_nobody_is_late_before_a_rank_has_said_its_timeout(
    timeouts: tuple[float, ...], limit: float | None
) -> None:
    facts: dict[str, Any] = {"start_ticks": 1, "phase": Phase.STARTING, "step": 0, "call": ""}
    facts |= {"waits_for": None, "thread_id": 1, "native_id": 1, "stacks_fd": None}
    statuses = [
        RankStatus(rank=rank, pid=1, attempt=0, timeout_s=timeout, **facts)
        for rank, timeout in enumerate(timeouts)
    ]
    assert seconds_to_follow(statuses) == limit


def rule() -> tuple[StuckRankRule, list[float]]:
    now = [0.0]
    return StuckRankRule(10.0, clock=lambda: now[0]), now


@pytest.mark.parametrize(
    ("signs", "late"),
    [
        ([RUNNING, RUNNING], []),  # nobody has left
        ([CLOSED, CLOSED], []),  # all may work on
        ([ENDED, RUNNING], [1]),
        ([CLOSED, RUNNING], [1]),
        ([ENDED, CLOSED, LEAVING], [1, 2]),
        ([LEAVING, LEAVING], [0, 1]),  # all hang in exit handlers
        ([LEAVING], []),  # a rank alone takes the time that it likes
        ([ENDED, ExitSign(stage=ExitStage.RUNNING, waits=True)], []),  # its call has a timeout
        ([ENDED, ExitSign(stage=ExitStage.CLOSED, closes=True)], []),  # which takes a little longer
    ],
)
def test_a_rank_is_late_once_another_one_has_left_and_nothing_has_changed_for_the_timeout(
    signs: list[ExitSign], late: list[int]
) -> None:
    checked, now = rule()
    by_rank = dict(enumerate(signs))
    assert checked.late(by_rank) == []
    now[0] = 9.9
    assert checked.late(by_rank) == []
    now[0] = 10.1
    assert checked.late(by_rank) == late


def test_every_call_and_step_of_a_rank_gives_all_of_them_the_timeout_again() -> None:
    checked, now = rule()
    for number in range(5):
        now[0] += 9.0
        assert checked.late({0: ENDED, 1: ExitSign(stage=ExitStage.RUNNING, progress=number)}) == []


def test_a_late_rank_that_ends_while_it_is_looked_at_is_said_to_have_ended() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    facts: dict[str, Any] = {"attempt": 0, "call": "", "waits_for": None, "stacks_fd": None}
    status = RankStatus(
        rank=0, pid=gone.pid, start_ticks=1, phase=Phase.CLOSED, step=6, thread_id=1,
        native_id=gone.pid, script_ended=True, **facts,
    )  # fmt: skip
    assert "rank 0 at step 6 has ended only now" in str(stuck_rank_error({0: status}, [0]))
