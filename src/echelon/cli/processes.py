"""Local processes of ``echelon run``: a thin front over torchrun's agent.

torchrun starts, watches and ends the ranks. This file gives it better defaults, shows what rank 0
prints while it runs, and says in a few lines what went wrong.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from echelon.cli.failures import cause_text, closing_processes, parse_agent_log, threads_per_rank
from echelon.world.failure import FailureRecord

__all__ = ["Launch", "run_processes"]

POLL_S = 0.05
SHUTDOWN_S = 5  # what ranks get to end in good order before the agent kills them
HOLD_S = 15.0  # how long a traceback of rank 0 is held back: it may be the end of the run
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One call of ``echelon run`` with processes.

    Attributes:
        script: what to run.
        arguments: of the script.
        ranks: how many processes.
        log_dir: where their output goes; None: a folder that goes away after success.
    """

    script: Path
    arguments: tuple[str, ...]
    ranks: int
    log_dir: Path | None = None

    def command(self, log_dir: str, live: bool) -> list[str]:
        """The torchrun command.

        Args:
            live: rank 0 writes straight to our standard output, because that is a terminal.
        """
        files = [f"{rank}:{2 if live and rank == 0 else 3}" for rank in range(self.ranks)]
        options = {
            "--nproc-per-node": str(self.ranks),
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": "127.0.0.1:0",  # any free port
            "--rdzv-id": "echelon",
            "--local-addr": "127.0.0.1",
            "--log-dir": log_dir,
            "--redirects": ",".join(files),
        }
        flags = [part for option in options.items() for part in option]
        module = [sys.executable, "-m", "torch.distributed.run"]
        return [*module, *flags, str(self.script), *self.arguments]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables to set; those that the user has set stay."""
        wanted = {
            "OMP_NUM_THREADS": str(threads_per_rank(self.ranks)),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",  # or lines in files would come late
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
        }
        return {name: value for name, value in wanted.items() if name not in environ}

    def shown(self) -> str:
        """The command as one would type it."""
        variables = [f"{k}={shlex.quote(v)}" for k, v in self.environment(os.environ).items()]
        log_dir = str(self.log_dir) if self.log_dir is not None else "LOG_DIR"
        return " ".join([*variables, shlex.join(self.command(log_dir, sys.stdout.isatty()))])


def run_processes(launch: Launch) -> int:
    """Run the ranks to their end; 0, or after a failure another exit code."""
    if launch.log_dir is not None:
        launch.log_dir.mkdir(parents=True, exist_ok=True)
    # Its own folder for each run, so that records of an earlier one are not taken for ours.
    log_dir = Path(tempfile.mkdtemp(prefix="echelon-run-", dir=launch.log_dir))
    caught, code = _watch(launch, log_dir)
    if caught is None and code != 0:
        return _explain(launch, log_dir)
    if launch.log_dir is None:
        shutil.rmtree(log_dir, ignore_errors=True)
    if caught is not None:
        print(f"{caught.name}: all ranks have ended", file=sys.stderr)
        return 128 + caught
    return 0


def _watch(launch: Launch, log_dir: Path) -> tuple[signal.Signals | None, int]:
    """Run torchrun, show what rank 0 writes; the signal that ended it, if one did, and its code."""
    live = sys.stdout.isatty()
    caught: list[signal.Signals] = []
    with open(log_dir / "torchrun.log", "w") as agent_log:
        process = subprocess.Popen(
            launch.command(str(log_dir), live),
            env={**os.environ, **launch.environment(os.environ)},
            stdin=subprocess.DEVNULL,
            stdout=None if live else agent_log,
            stderr=agent_log,
            # Ctrl-C reaches this process alone, which passes it on once.
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )

        def forward(number: int, frame: FrameType | None) -> None:
            if caught and process.poll() is None:
                process.kill() if len(caught) > 2 else process.terminate()
            else:
                process.send_signal(number)
            caught.append(signal.Signals(number))

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, forward) for number in numbers}
        hurry = _Hurry(process.pid, log_dir / "torchrun.log")
        tails = [_Tail(log_dir, "stderr.log", sys.stderr)]
        if not live:
            tails.append(_Tail(log_dir, "stdout.log", sys.stdout))
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                for tail in tails:
                    tail.show()
                hurry.look()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        for tail in tails:
            tail.show(last=True, failed=process.returncode != 0)
    return (caught[0] if caught else None), process.returncode


class _Hurry:
    """Ends ranks that do not end when torchrun tells them to, such as stopped ones.

    torchrun itself waits half a minute for them.
    """

    def __init__(self, agent: int, log: Path) -> None:
        self._agent, self._log = agent, log
        self._told: dict[int, float] = {}  # by process, when it was seen to be told
        self._next = 0.0

    def look(self) -> None:
        """Call often; looks once a second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 1.0
        for pid in closing_processes(_text(self._log)):
            self._told.setdefault(pid, now)
        for pid, since in self._told.items():
            if now - since > SHUTDOWN_S and _parent(pid) == self._agent:
                os.kill(pid, signal.SIGKILL)


def _parent(pid: int) -> int | None:
    """The process that started ``pid``; None where that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


class _Tail:
    """Copies what rank 0 writes to a file onto a stream, as it grows.

    A traceback may be the end of the run, whose cause is told at the end by its first line; so
    it is held back for a moment, and dropped if the run has failed.
    """

    def __init__(self, log_dir: Path, name: str, stream: TextIO) -> None:
        self._log_dir, self._name, self._stream = log_dir, name, stream
        self._file: TextIO | None = None
        self._held = ""
        self._held_since = 0.0

    def show(self, last: bool = False, failed: bool = False) -> None:
        """Copy what is new; with ``last``, also what was held back, unless the run ``failed``."""
        if self._file is None:
            found = list(self._log_dir.glob(f"*/attempt_*/0/{self._name}"))
            if not found:
                return
            self._file = open(found[0], encoding="utf-8", errors="replace")  # noqa: SIM115
        text = self._held + self._file.read()
        start = text.find("Traceback (most recent call last)")
        if start < 0 or (last and not failed):
            shown, self._held = text, ""
        else:
            if not self._held:
                self._held_since = time.monotonic()
            shown, self._held = text[:start], text[start:]
            if time.monotonic() - self._held_since > HOLD_S and not last:
                shown, self._held = text, ""
        if shown:
            self._stream.write(shown)
            self._stream.flush()
        if last:
            self._file.close()


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _explain(launch: Launch, log_dir: Path) -> int:
    """Print what went wrong, in at most 25 lines; the exit code of the rank that failed."""
    records, logs = {}, {}
    for rank in range(launch.ranks):
        for folder in log_dir.glob(f"*/attempt_*/{rank}"):
            if record := FailureRecord.read(folder / "error.json"):
                records[rank] = record
            logs[rank] = _text(folder / "stderr.log")
    agent_log = _text(log_dir / "torchrun.log")
    exits = parse_agent_log(agent_log)
    notes = [f"all output is in {log_dir}"]
    print("\n".join(cause_text(records, exits, logs, agent_log, notes)), file=sys.stderr)
    followers = {rank for rank, record in records.items() if record.follows}
    codes = (
        exit.code for rank, exit in sorted(exits.items()) if exit.code > 0 and rank not in followers
    )
    return next(codes, 1)  # torchrun passes on none of them


def _end_with_parent() -> None:
    """In the child before it starts: end in good order if the parent is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
