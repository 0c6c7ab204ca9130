"""torch's agent as echelon runs it: what it does about ranks that end, and about signals.

The ranks are small scripts without torch. The agent runs in a process that has torch already.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from echelon.launch import agent
from echelon.launch.attempt import Attempt, Outcome
from echelon.process import time_limits
from tests.cli.jobs import SAVES
from tests.processes import has_ended, wait_until

WAIT_S = 60.0


def run_agent(folder: str, options: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """What a process of its own does: the agent with two ranks."""
    with open(f"{folder}/agent.log", "w") as log:
        os.dup2(log.fileno(), 2)
    options = ("--ranks", "2", "--log-dir", f"{folder}/logs", *options)
    code = agent.main([*options, f"{folder}/job.py", *arguments, folder])
    os._exit(code)


@contextmanager
def started(
    folder: Path, script: str, *arguments: str, options: tuple[str, ...] = ()
) -> Iterator[BaseProcess]:
    """The agent of a job, which runs its script and is ended at the latest after the block."""
    (folder / "job.py").write_text(script)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run_agent, args=(str(folder), options, arguments))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def send(process: BaseProcess, number: signal.Signals) -> None:
    """Send the agent a signal."""
    assert process.pid is not None
    os.kill(process.pid, number)


def wait_for(*files: Path) -> None:
    """Wait until the ranks have made some files."""
    wait_until(lambda: all(file.exists() for file in files), limit_s=WAIT_S)


def attempts(process: BaseProcess, folder: Path) -> list[Attempt]:
    """Wait for the end of a job; its attempts, the last of which gave the exit code."""
    process.join(WAIT_S)
    found = Attempt.read(folder / "logs" / "attempts.jsonl")
    assert found, (folder / "agent.log").read_text()
    assert process.exitcode == found[-1].exit_code
    return found


@pytest.mark.slow
def test_a_rank_that_leaves_to_go_on_later_is_waited_with_and_nobody_restarts(
    tmp_path: Path,
) -> None:
    for rank in range(2):  # rank 1 takes a second longer
        (tmp_path / f"go-{rank}").touch()
    with started(tmp_path, SAVES, "", options=("--max-restarts", "2")) as process:
        (attempt,) = attempts(process, tmp_path)
    assert (attempt.codes, attempt.signaled, attempt.killed) == ({0: 75, 1: 75}, (), ())
    assert process.exitcode == 75
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["0", "0"]


@pytest.mark.slow
def test_a_rank_that_leaves_alone_to_go_on_later_has_failed_and_nobody_restarts(
    tmp_path: Path,
) -> None:
    (tmp_path / "go-0").touch()
    options = ("--max-restarts", "2", "--grace", "0.5")
    with started(tmp_path, SAVES, "", options=options) as process:
        (attempt,) = attempts(process, tmp_path)
    assert (attempt.codes, attempt.killed) == ({0: 75, 1: -9}, (1,))
    assert attempt.outcome is Outcome.FAILED
    assert process.exitcode == 1


@pytest.mark.slow
def test_ctrl_c_twice_and_sigquit_do_not_wait_for_the_grace(tmp_path: Path) -> None:
    deaf = SAVES.replace('"SIGUSR1")', '"SIGUSR1", "SIGINT")')
    for signals in ([signal.SIGINT, signal.SIGINT], [signal.SIGUSR1, signal.SIGQUIT]):
        folder = tmp_path / signals[-1].name
        folder.mkdir()
        with started(folder, deaf, "deaf", options=("--grace", "300")) as process:
            wait_for(folder / "ready-0-1", folder / "ready-1-1")
            send(process, signals[0])
            time.sleep(1.0)
            assert process.is_alive()
            start_s = time.monotonic()
            send(process, signals[1])
            (attempt,) = attempts(process, folder)
        assert time.monotonic() - start_s < 20
        assert (attempt.stop, attempt.hurried) == (signals[0].name, True)
        assert attempt.killed == (0, 1)
        assert process.exitcode == 128 + signals[0]


@pytest.mark.slow
def test_a_signal_that_comes_to_all_processes_of_a_job_counts_once(tmp_path: Path) -> None:
    script = SAVES.replace('"SIGUSR1")', '"SIGUSR1", "SIGINT")')
    with started(tmp_path, script, "", options=("--grace", "60")) as process:
        wait_for(tmp_path / "ready-0-1", tmp_path / "ready-1-1")
        for _ in range(3):
            send(process, signal.SIGINT)
        (attempt,) = attempts(process, tmp_path)
    assert (attempt.codes, attempt.hurried) == ({0: 75, 1: 75}, False)
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["1", "1"]


FAILS = """
import os, pathlib, signal, subprocess, sys, time

mode, folder = sys.argv[1], pathlib.Path(sys.argv[2])
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
(folder / f"started-{rank}-{attempt}").touch()
if rank == "0" and attempt == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "300"])
    (folder / "child.part").write_text(str(child.pid))
    (folder / "child.part").rename(folder / "child")
    time.sleep(300)
if attempt == 1:
    while not (folder / "child").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "again" and rank == "1":
    while not (folder / "started-0-2").exists():
        time.sleep(0.02)
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "codes"), [("", {0: 0, 1: 0}), ("again", None)])
def test_after_a_failure_all_ranks_start_again_and_nothing_of_before_is_left(
    mode: str, codes: dict[int, int] | None, tmp_path: Path
) -> None:
    start_s = time.monotonic()
    with started(tmp_path, FAILS, mode, options=("--max-restarts", "1")) as process:
        first, second = attempts(process, tmp_path)
    assert time.monotonic() - start_s < time_limits.END_S + 20  # torch's agent alone: 30 s
    assert first.codes == {0: -9, 1: -9}
    assert (first.signaled, first.killed) == ((0,), (0,))  # rank 0 did not listen
    assert first.restarts
    assert has_ended(int((tmp_path / "child").read_text()))
    assert not second.restarts
    if codes is not None:
        assert second.codes == codes
        assert process.exitcode == 0
    else:
        assert (second.number, second.most, second.codes[1]) == (2, 2, 3)
        assert process.exitcode == 3
    assert (tmp_path / "started-0-2").exists()


@pytest.mark.slow
def test_a_stop_is_never_followed_by_another_attempt(tmp_path: Path) -> None:
    script = SAVES.replace("sys.exit(75)", "raise OSError('no space left')")
    with started(tmp_path, script, "", options=("--max-restarts", "3")) as process:
        wait_for(tmp_path / "ready-0-1", tmp_path / "ready-1-1")
        send(process, signal.SIGTERM)
        (attempt,) = attempts(process, tmp_path)
    assert attempt.codes == {0: 1, 1: 1}
    assert (attempt.stop, attempt.restarts) == ("SIGTERM", False)


@pytest.mark.slow
def test_every_rank_has_files_of_its_own_past_the_ninth_too(tmp_path: Path) -> None:
    script = "import os; print('this is rank', os.environ['RANK'])"
    with started(tmp_path, script, options=("--ranks", "11")) as process:
        (attempt,) = attempts(process, tmp_path)
    assert attempt.codes == dict.fromkeys(range(11), 0)
    for rank in range(11):
        (file,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/stdout.log")
        assert file.read_text() == f"this is rank {rank}\n"


def test_an_agent_whose_launcher_has_ended_before_starts_no_rank(tmp_path: Path) -> None:
    with started(tmp_path, SAVES, "", options=("--end-with", "0")) as process:
        process.join(WAIT_S)
    assert process.exitcode == 128 + signal.SIGTERM
    assert Attempt.read(tmp_path / "logs" / "attempts.jsonl") == []
    assert not list(tmp_path.glob("ready-*"))
