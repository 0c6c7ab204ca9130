"""What a rank's process does at its end: it leaves a record, and ends with its agent."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from echelon.diagnosis.exit_guard import error_file, install_failure_record
from echelon.diagnosis.failure_record import FailureRecord
from tests.cli.jobs import Job
from tests.diagnosis.test_failure_record import raised

SCRIPT = """
import pathlib, sys, time, torch
import echelon as ec

with ec.init(sys.argv[1], timeout=6) as world:
    weight = torch.ones(2, requires_grad=True)
    for step in range(10_000):
        (weight * (world.rank + 1)).sum().backward()
        world.group.all_reduce(weight.grad)
        weight.grad = None
        time.sleep(0.05)
        if step == 3:
            pathlib.Path(sys.argv[2], f"trains-{world.rank}").touch()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ranks_whose_agent_is_killed_end_within_the_timeout_and_say_so(
    backend: str, tmp_path: Path
) -> None:
    with Job(tmp_path, SCRIPT, backend, str(tmp_path), launcher=TORCHRUN) as job:
        job.wait_for("trains-0", "trains-1")
        os.kill(job.launcher.pid, signal.SIGKILL)
        start_s = time.monotonic()
        _, _, lines = job.end()  # which is when the last rank has closed its standard error
        assert time.monotonic() - start_s < 6 + 10
    said = "\n".join(lines)
    assert "the agent of torchrun on the host of rank" in said
    assert f"(process {job.launcher.pid}) has ended, and its ranks end with it" in said


def test_the_hook_writes_a_record_and_python_still_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: reported.append(kind))
    remove = install_failure_record(tmp_path / "error.json", 1, lambda: "at step 7")
    error = raised(ValueError("boom"))
    sys.excepthook(type(error), error, error.__traceback__)
    record = FailureRecord.read(tmp_path / "error.json")
    assert record is not None
    assert (record.rank, record.type, reported) == (1, "ValueError", [ValueError])
    assert record.headline == "rank 1 at step 7 raised ValueError: boom"
    remove()
    assert sys.excepthook(KeyError, KeyError(), None) is None
    assert reported == [ValueError, KeyError]


def test_what_a_fork_or_another_thread_reports_ends_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: reported.append(kind))
    install_failure_record(tmp_path / "error.json", rank=1)
    # As multiprocessing does in its thread that serves files, mostly of a worker that loads data.
    thread = threading.Thread(target=sys.excepthook, args=(OSError, OSError(), None))
    thread.start()
    thread.join()
    assert reported == [OSError]
    worker = multiprocessing.get_context("fork").Process(
        target=sys.excepthook, args=(OSError, OSError(), None)
    )
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert not (tmp_path / "error.json").exists()


def test_ctrl_c_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: None)
    install_failure_record(tmp_path / "error.json", rank=1)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not (tmp_path / "error.json").exists()


def test_our_own_variable_wins_over_torchruns() -> None:
    both = {"ECHELON_ERROR_FILE": "/a", "TORCHELASTIC_ERROR_FILE": "/b"}
    assert error_file(both) == Path("/a")
    assert error_file({"TORCHELASTIC_ERROR_FILE": "/b"}) == Path("/b")
    assert error_file({}) is None
