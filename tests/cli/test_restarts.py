"""What the screen says when a job starts again. Also: how a killed launcher leaves the machine."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from echelon.launch.rank_output import RunFolder
from tests.cli.jobs import Job
from tests.processes import wait_until

FAILS = """
import os, pathlib, signal, sys, time

rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
print("rank", rank, "attempt", attempt, flush=True)
printed = pathlib.Path(sys.argv[1]) / f"printed-{attempt}"
if rank == "0":
    printed.touch()
while not printed.exists():
    time.sleep(0.02)
if rank == "1" and attempt == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1":
    raise ValueError("boom")
"""

# A rank that is stopped, one that does not listen, and a child of each: as hard to end as can be.
STAYS = """
import os, pathlib, signal, subprocess, sys, time

subprocess.Popen(["sleep", "300"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(pathlib.Path(sys.argv[1]) / f"ready-{os.environ['RANK']}").touch()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(300)
"""

END_S = 8.0  # five and some for a busy machine


def wait_for_the_end(job: Job) -> None:
    """Wait until no process of a job is left; not for longer than that may take."""
    wait_until(lambda: not job.processes(), limit_s=END_S)


@pytest.mark.slow
def test_the_screen_says_who_failed_and_which_attempt_begins(tmp_path: Path) -> None:
    with Job(tmp_path, FAILS, str(tmp_path), options=("--max-restarts", "1")) as job:
        code, output, errors = job.end()
        assert code == 1
        assert output == "rank 0 attempt 1\nrank 0 attempt 2\n"
        (logs,) = job.log_folders()
        assert errors[:3] == [
            "rank 1 was killed by SIGKILL",
            f"attempt 2 of 2 begins: all ranks start again; the output of attempt 1 is in {logs}",
            "rank 1 raised ValueError: boom",
        ]
        assert errors[-2:] == ["this was attempt 2 of 2", f"all output is in {logs}"]
        assert len(errors) <= 2 + 25


@pytest.mark.slow
def test_attempts_before_a_success_are_told_and_leave_nothing(tmp_path: Path) -> None:
    script = FAILS.replace('raise ValueError("boom")', "pass")
    with Job(tmp_path, script, str(tmp_path), options=("--max-restarts", "3")) as job:
        code, output, errors = job.end()
        assert (code, output) == (0, "rank 0 attempt 1\nrank 0 attempt 2\n")
        assert errors[0] == "rank 1 was killed by SIGKILL"
        assert errors[1].startswith("attempt 2 of 4 begins")
        assert errors[2].startswith("rank 1 printed, too: --tee shows it")
        assert len(errors) == 3
        assert job.log_folders() == []


@pytest.mark.slow
def test_a_launcher_that_is_killed_while_its_agent_starts_leaves_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, STAYS, str(tmp_path)) as job:
        job.wait(lambda: "launch.agent" in " ".join(job.processes().values()))
        job.launcher.kill()
        wait_for_the_end(job)
        assert not (tmp_path / "ready-0").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "ignores"),
    [
        ("launcher", None),
        ("launcher", "INT QUIT"),  # as a shell starts it in the background of a script
        ("agent", None),
        ("both", None),
    ],
)
def test_every_process_of_a_job_ends_with_its_launcher_and_with_its_agent(
    killed: str, ignores: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = STAYS
    if killed == "both":  # then the kernel ends the ranks, and nobody is left to end their children
        script = script.replace('subprocess.Popen(["sleep", "300"])', "")
    options = ("--grace", "300")
    with Job(tmp_path, script, str(tmp_path), options=options, ignores=ignores) as job:
        job.wait_for("ready-0", "ready-1")
        agent = job.agent()
        ours = [pid for pid in job.processes() if pid not in (agent, job.launcher.pid)]
        assert len(ours) == (2 if killed == "both" else 4)
        if killed != "launcher":
            os.kill(agent, signal.SIGKILL)
        if killed != "agent":
            job.launcher.kill()
        wait_for_the_end(job)
        code, _, errors = job.end()
        if killed == "agent":
            assert code == 1
            assert errors[0] == "torch's agent was killed by SIGKILL, and the ranks with it"
            return
        assert code == -signal.SIGKILL
        assert len(job.log_folders()) == 1
        monkeypatch.setattr(tempfile, "tempdir", str(job.temporary))
        after = RunFolder(None)  # as the next run makes it
        assert job.log_folders() == [after.path]
        after.drop()
