"""Jobs that are asked to stop, as their user sees it; tests/launch/test_agent.py has the rest."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.jobs import SAVES, Job

READY = ("ready-0-1", "ready-1-1")


@pytest.mark.slow
def test_ranks_that_save_and_leave_after_a_signal_are_not_a_failure(tmp_path: Path) -> None:
    options = ("--max-restarts", "2", "--grace", "60")
    with Job(tmp_path, SAVES, "child", str(tmp_path), options=options) as job:
        job.wait_for(*READY)
        job.launcher.send_signal(signal.SIGUSR1)
        job.wait_for("saved-0")
        # The rank that still saves hears of neither, nor does what a rank has started.
        job.launcher.send_signal(signal.SIGUSR1)
        job.launcher.send_signal(signal.SIGTERM)
        assert "sleep" in " ".join(job.processes().values())
        code, output, errors = job.end()
        assert (code, output) == (75, "")
        line = "all ranks have left to go on later: the same command resumes (exit code 75)"
        assert errors == [f"SIGUSR1: {line}"]
        assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["1", "1"]
        assert not (tmp_path / "ready-0-2").exists()
        assert job.log_folders() == []
        assert job.processes() == {}


@pytest.mark.slow
def test_ranks_that_do_not_leave_in_time_are_killed_and_the_text_says_so(tmp_path: Path) -> None:
    options = ("--grace", "1.5")
    with Job(tmp_path, SAVES, "deaf", str(tmp_path), options=options, ignores="HUP") as job:
        job.wait_for(*READY)
        job.launcher.send_signal(signal.SIGHUP)  # as a terminal does that closes
        start_s = time.monotonic()
        job.launcher.send_signal(signal.SIGTERM)
        code, _, errors = job.end()
        assert 1.5 < time.monotonic() - start_s < 20
        assert code == 128 + signal.SIGTERM
        assert errors[0] == (
            "SIGTERM: ranks 0, 1 had not left after 1.5 s and were killed: what was not saved by "
            "then is lost"
        )
        assert errors[1:] == [f"all output is in {job.log_folders()[0]}"]


@pytest.mark.slow
def test_where_only_some_ranks_have_saved_the_line_says_so_and_the_output_stays(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, SAVES, "mortal", str(tmp_path)) as job:
        job.wait_for(*READY)
        job.launcher.send_signal(signal.SIGTERM)
        code, _, errors = job.end()
        assert code == 128 + signal.SIGTERM
        assert errors == [
            "SIGTERM: all ranks have ended, only rank 0 with code 75",
            f"all output is in {job.log_folders()[0]}",
        ]


@pytest.mark.slow
def test_the_command_that_print_shows_does_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SAVES)
    for rank in range(2):
        (tmp_path / f"go-{rank}").touch()
    arguments = ["--ranks", "2", "--max-restarts", "2", "--print", "job.py", "", "."]
    show = [sys.executable, "-m", "echelon", "run", *arguments]
    shown = subprocess.run(show, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    done = subprocess.run(shown.stdout, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 75
    assert (
        "attempt 1 of 3: the ranks left on request, and can go on from what they have saved (exit "
        "codes by rank: 0: 75, 1: 75)"
    ) in done.stderr
