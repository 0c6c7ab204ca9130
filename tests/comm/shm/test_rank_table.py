"""Ranks that wait use no core, and ranks die with the process that started them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import echelon as ec
from tests.children import environ
from tests.processes import becomes_true, has_ended

ROOT = Path(__file__).resolve().parents[3]


def wait_in_every_way(world: ec.World) -> dict[str, float]:
    """Share of a core that this rank used while it waited for the other, by way of waiting."""
    group, output = world.group, torch.empty(1)
    long_message = torch.empty(2_000_000)
    waits: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(output),
        "recv": lambda: group.recv(output, 0),
        "work": lambda: group.all_reduce(output, async_op=True).wait(),
        "message": lambda: group.irecv(output, 0, tag=1).wait(),
        "full ring": lambda: group.send(long_message, 0, tag=2),
    }
    answers: dict[str, Callable[[], object]] = {
        **waits,
        "recv": lambda: group.send(output, 1),
        "message": lambda: group.send(output, 1, tag=1),
        "full ring": lambda: group.recv(long_message, 1, tag=2),
    }
    shares = {}
    for name in waits:
        group.barrier()
        if world.rank == 0:
            time.sleep(0.4)
            answers[name]()
            continue
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        waits[name]()
        shares[name] = (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s)
    return shares


@pytest.mark.slow
def test_a_rank_that_waits_uses_less_than_a_twentieth_of_a_core() -> None:
    shares = ec.run(wait_in_every_way, 2, "processes")[1]
    assert len(shares) == 5
    assert max(shares.values()) < 0.05, shares


def stay(world: ec.World, folder: str) -> None:
    """Note the pid, then never end: asleep, in a wait, and stopped."""
    (Path(folder) / f"{os.getpid()}.pid").touch()
    if world.rank == 0:
        time.sleep(60.0)
    elif world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    world.group.barrier()


@pytest.mark.slow
def test_ranks_die_with_the_process_that_started_them(tmp_path) -> None:
    code = (
        "import sys, echelon as ec; from tests.comm.shm.test_rank_table import stay;"
        "ec.run(stay, 3, 'processes', args=(sys.argv[1],))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    caller = subprocess.Popen(command, cwd=ROOT, env=environ())
    try:
        assert becomes_true(lambda: len(list(tmp_path.glob("*.pid"))) == 3, 60.0)
        time.sleep(0.1)  # they do what they are meant to do
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        assert not any(map(has_ended, pids))
    finally:
        caller.kill()
        caller.wait()
    assert becomes_true(lambda: all(map(has_ended, pids)), 2.0)
