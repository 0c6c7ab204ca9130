"""Real signals to the ranks of ``echelon run``: each saves, and the job says that it can go on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.children import environ
from tests.processes import wait_until

RANKS = 2
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
import echelon as ec

folder, mode = Path(sys.argv[1]), sys.argv[2]

def note(name, text):
    (folder / "part").with_suffix(f".{ec.init().rank}").write_text(str(text))
    (folder / "part").with_suffix(f".{ec.init().rank}").rename(folder / name)

with ec.init(timeout=60) as world:
    data = torch.arange(400_000)
    sampler = ec.ResumableSampler(len(data), 4, world.group)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2 if mode == "workers" else 0)
    weight = torch.ones(1, requires_grad=True)
    with ec.StopSignals(world.group, grace_s=60) as stop:
        for step, batch in enumerate(sampler.batches(loader)):
            (weight * batch.sum()).backward()
            world.group.all_reduce(weight.grad)
            if step == 3:
                note(f"pid-{world.rank}", os.getpid())
            time.sleep(0.005)
            if stop.requested():
                if mode == "stuck":
                    time.sleep(60)
                if mode == "slow" and world.rank == 0:
                    time.sleep(3)  # others must not end the job by leaving it
                note(f"saved-{world.rank}", sampler.position)
                sys.exit(stop.exit_code)
"""


@contextmanager
def job(folder: Path, mode: str = "", world: str = "processes") -> Iterator[subprocess.Popen[str]]:
    """``echelon run`` of the script on two ranks, once they train."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    options = ["--world", world, *(["--grace", "30"] if world == "processes" else [])]
    command = ["run", "--ranks", str(RANKS), *options, str(script), str(folder), mode]
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ(TMPDIR=str(folder)),
    )
    try:
        wait_until(lambda: len(list(folder.glob("pid-*"))) == RANKS, process)
        yield process
    finally:
        with process:  # which waits for it and closes its pipes
            process.kill()  # a failed test: the ranks end with it


def pid_of(folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text())


def saved(folder: Path) -> list[str]:
    """Where the ranks saved that the data stands."""
    return [(folder / f"saved-{rank}").read_text() for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "who"), [(signal.SIGUSR1, "rank 1"), (signal.SIGTERM, "the command")]
)
def test_a_signal_to_one_rank_or_to_the_command_saves_on_all_and_exits_with_75(
    number: signal.Signals, who: str, tmp_path: Path
) -> None:
    # Rank 0 saves for a while: the others must not end the job by leaving it.
    with job(tmp_path, "slow" if who == "rank 1" else "fast") as process:
        os.kill(pid_of(tmp_path, 1) if who == "rank 1" else process.pid, number)
        start_s = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 75, errors
        assert time.monotonic() - start_s < (13 if who == "rank 1" else 10)
    first, second = saved(tmp_path)
    assert first == second


@pytest.mark.slow
def test_a_signal_to_all_processes_does_not_end_the_workers_that_load_data(tmp_path: Path) -> None:
    with job(tmp_path, "workers") as process:
        ranks = [pid_of(tmp_path, rank) for rank in range(RANKS)]
        workers = [
            int(pid)
            for rank in ranks
            for children in Path(f"/proc/{rank}/task").glob("*/children")
            for pid in children.read_text().split()
        ]
        assert len(workers) == 2 * RANKS
        for pid in (*workers, *ranks):  # as some schedulers do with the processes of a job
            os.kill(pid, signal.SIGUSR1)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 75, errors
    assert len(set(saved(tmp_path))) == 1
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda n: n.name)
def test_simulated_ranks_hear_the_signals_of_their_process(
    number: signal.Signals, tmp_path: Path
) -> None:
    with job(tmp_path, world="threads") as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (75, "")
    first, second = saved(tmp_path)
    assert first == second
