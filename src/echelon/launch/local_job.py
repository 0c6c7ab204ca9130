"""Local processes of ``echelon run``: a thin front over torch's agent.

The agent starts, watches, restarts and ends the ranks. This file gives it better defaults, shows
what rank 0 prints while it runs, and says in a few lines how it ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from echelon.diagnosis.failure_record import FailureRecord
from echelon.diagnosis.failure_report import failure_report
from echelon.errors.message_text import ranks_text, say
from echelon.launch.attempt import (
    STOP_SIGNALS,
    Attempt,
    Outcome,
    failure_lines,
    leaving_line,
    restart_lines,
)
from echelon.launch.program import Launch
from echelon.launch.rank_output import RunFolder, Screen, has_output
from echelon.process import die_with_parent, time_limits
from echelon.process.lossy_streams import has_lost, lose_rather_than_raise
from echelon.process.plain_file import open_plain

POLL_S = 0.05
_LOG = "agent.log"
_MAX_LOG_NBYTES = 1 << 22


def run_processes(launch: Launch, folder: RunFolder) -> int:
    """Run the ranks to their end; 0, or another exit code if they did not finish.

    Args:
        folder: where their output goes.
    """
    lose_rather_than_raise()
    # In memory, because the disk of the folder may be full when the job ends.
    with open(os.memfd_create("echelon attempts"), "rb") as file:
        attempts_path = f"/proc/self/fd/{file.fileno()}"
        caught, code = _run_agent(launch, folder.path, file.fileno(), attempts_path)
        attempts = Attempt.read(attempts_path)
    if not attempts or code != attempts[-1].exit_code or attempts[-1].restarts:
        return _end_without_agent(folder, caught, code)
    last = attempts[-1]
    if (line := _lost(folder.path)) is not None:
        say(line)
    if last.outcome is Outcome.FAILED:
        notes = [f"all output is in {folder.keep()}"]
        say(*_failure(last, launch, folder.path, notes))
        return code
    if last.outcome is not Outcome.FINISHED:
        say(leaving_line(last, launch.grace))
    for cost in last.held_up:
        say(cost)
    unsaved = last.outcome is Outcome.STOPPED and os.EX_TEMPFAIL in last.codes.values()
    if last.killed or unsaved:
        say(f"all output is in {folder.keep()}")
    else:
        line = _unseen(launch, folder.path)
        if line is not None and last.outcome is Outcome.FINISHED:
            say(line)
        folder.drop()
    return code


def _unseen(launch: Launch, log_dir: Path) -> str | None:
    """Where to find what ranks printed and the screen did not show; None if there is nothing."""
    if launch.log_dir is not None:
        return f"all output is in {log_dir}"
    if launch.tee:
        return None
    logs = (
        path for rank in range(1, launch.ranks) for path in log_dir.glob(f"*/*/{rank}/std*.log")
    )
    unseen = sorted({int(path.parent.name) for path in logs if has_output(path)})
    if not unseen:
        return None
    return (
        f"{ranks_text(unseen)} printed, too: --tee shows it, --log-dir DIR keeps it in a file for "
        "each rank"
    )


def _lost(log_dir: Path) -> str | None:
    """Whose output the disk has not taken; None: nobody's."""
    logs = (path for path in log_dir.glob("*/attempt_*/*/std*.log") if has_lost(path))
    ranks = sorted({int(path.parent.name) for path in logs})
    if not ranks:
        return None
    return (
        f"{ranks_text(ranks)} printed more than {log_dir} could take: its disk was full, and what "
        "did not fit is lost. --log-dir DIR keeps the output on another disk"
    )


def _run_agent(
    launch: Launch, log_dir: Path, attempts: int, attempts_path: str
) -> tuple[list[signal.Signals], int]:
    """Run the agent and show what rank 0 writes; the signals that came meanwhile, and its code."""
    live = sys.stdout.isatty() and not launch.tee
    with open(log_dir / _LOG, "w") as log:
        process = subprocess.Popen(
            launch.command(str(log_dir), live, os.getpid(), attempts_path),
            env={**os.environ, **launch.environment(os.environ)},
            stdin=subprocess.DEVNULL,
            stdout=None if live else log,
            stderr=log,
            pass_fds=[attempts],
            # Ctrl-C reaches this process alone, which passes it on.
            start_new_session=True,
            # Until it has started and can end its ranks in good order, it ends with us at once.
            preexec_fn=partial(
                die_with_parent.signal_on_death_of_parent, os.getpid(), signal.SIGKILL
            ),
        )
        screen = Screen(log_dir, live, tee=launch.ranks if launch.tee else None)
        shown = 0
        with _passing_on(process, launch.grace) as caught:
            while process.poll() is None:
                time.sleep(POLL_S)
                screen.show()
                for attempt in Attempt.read(attempts_path)[shown:]:
                    if attempt.restarts:
                        screen.close_attempt(failed=True)
                        lines = restart_lines(attempt, _failure(attempt, launch, log_dir), log_dir)
                        say(*lines)
                        shown += 1
        screen.close_attempt(failed=process.returncode != 0)
    return caught, process.returncode


@contextmanager
def _passing_on(process: subprocess.Popen[bytes], grace: float) -> Iterator[list[signal.Signals]]:
    """Pass signals on to the agent, which knows what to do; the list of those that came."""
    caught: list[signal.Signals] = []

    def forward(number: int, frame: FrameType | None) -> None:
        caught.append(signal.Signals(number))
        process.send_signal(number)

    # A signal that is ignored stays so, as nohup wants it.
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield caught
    finally:
        if process.poll() is None:
            process.terminate()  # as a stop signal: ranks get their time to save
            try:
                process.wait(grace + time_limits.KILL_S)
            except subprocess.TimeoutExpired:  # it is stopped, or stuck: the kernel ends its ranks
                process.kill()
                process.wait(time_limits.KILL_S)
        for number, handler in before.items():
            signal.signal(number, handler)


def _failure(
    attempt: Attempt, launch: Launch, log_dir: Path, notes: Sequence[str] = ()
) -> list[str]:
    """What went wrong in one attempt, in at most 25 lines."""
    records, logs = {}, {}
    for rank in range(launch.ranks):
        for folder in log_dir.glob(f"*/attempt_{attempt.number - 1}/{rank}"):
            if record := FailureRecord.read(folder / "error.json"):
                records[rank] = record
            logs[rank] = _text(folder / "stderr.log")
    return failure_lines(attempt, records, logs, launch.grace, notes)


def _end_without_agent(folder: RunFolder, caught: Sequence[signal.Signals], code: int) -> int:
    """Say how a run ended whose agent could not; end what it has left. The exit code."""
    _kill_run(folder.path.name)
    if caught and not any(folder.path.glob("*/attempt_*")):
        say(f"{caught[0].name}: the ranks had not started yet")
        folder.drop()
        return 128 + caught[0]
    notes = [f"all output is in {folder.keep()}"]
    if code < 0:
        name = signal.Signals(-code).name
        lines = [f"torch's agent was killed by {name}, and the ranks with it", *notes]
    else:
        lines = failure_report([], notes, agent_log=_text(folder.path / _LOG))
    say(*lines)
    return 1


def _kill_run(run_id: str) -> None:
    """End what a killed agent has left: the kernel ends its ranks, but not their children."""
    mark = f"TORCHELASTIC_RUN_ID={run_id}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or gone
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _text(log: Path) -> str:
    """What is in a log; of a long one the end, where the failure is."""
    with open_plain(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_LOG_NBYTES))
        return file.read(_MAX_LOG_NBYTES).decode(errors="replace")
