"""Jobs as a user starts them, by ``echelon run`` or else, and what the system knows of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from echelon.process.listeners import Listener
from tests.children import environ
from tests.listeners import listeners_of
from tests.processes import wait_until

MARK = "ECHELON_TEST_JOB"
WAIT_S = 90.0
ECHELON_RUN = (sys.executable, "-m", "echelon", "run", "--ranks", "2")

# A rank that saves and leaves when it is asked to. The first argument says what else it does.
SAVES = """
import os, pathlib, signal, subprocess, sys, time

mode, folder = sys.argv[1], pathlib.Path(sys.argv[2])
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
asked = []
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), lambda number, frame: asked.append(number))
if mode == "mortal" and rank == "1":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
if mode == "child":  # as a loader of data has; a signal would end it
    subprocess.Popen(["sleep", "300"])
(folder / f"ready-{rank}-{attempt}").touch()
while not (asked or (folder / f"go-{rank}").exists()):
    time.sleep(0.02)
if mode == "deaf":
    time.sleep(300)
if rank == "1":
    time.sleep(1.0)  # it has more to save
(folder / f"saved-{rank}").write_text(f"{len(asked)}")
sys.exit(75)
"""


class Job:
    """One job, and all processes that come of it.

    Args:
        folder: of the test; logs and temporary files go below it.
        script: the text of the script.
        launcher: what starts the script.
        options: of the launcher, before the script.
        ignores: signals that the caller ignores, as ``nohup`` does.
        arguments: of the script.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *arguments: str,
        launcher: tuple[str, ...] = ECHELON_RUN,
        options: tuple[str, ...] = (),
        ignores: str | None = None,
    ) -> None:
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        (folder / "job.py").write_text(script)
        self._mark = uuid.uuid4().hex
        command = [*launcher, *options]
        if ignores is not None:
            command = ["sh", "-c", f"trap '' {ignores}; exec \"$@\"", "sh", *command]
        self.launcher = subprocess.Popen(
            [*command, str(folder / "job.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ(**{"TMPDIR": str(self.temporary), MARK: self._mark}),
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.launcher.communicate()

    def processes(self) -> dict[int, str]:
        """The processes of this job that run, and their command lines."""
        mark, commands = f"{MARK}={self._mark}".encode(), {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                ours = mark in (process / "environ").read_bytes().split(b"\0")
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue  # it ended, or is another user's
            if ours and command:  # without one it has ended, and nobody has waited for it yet
                commands[int(process.name)] = command.decode(errors="replace")
        return commands

    def agent(self) -> int:
        """The process of torch's agent."""
        return next(pid for pid, command in self.processes().items() if "launch.agent" in command)

    def listeners(self) -> set[Listener]:
        """The sockets on which any process of this job listens."""
        return set[Listener]().union(*(listeners_of(pid) for pid in self.processes()))

    def wait_for(self, *names: str) -> None:
        """Wait until ranks have made files of these names in the folder of the test."""
        self.wait(lambda: all((self.folder / name).exists() for name in names))

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something is so, as long as the job runs."""
        wait_until(ready, self.launcher, limit_s=WAIT_S)

    def end(self) -> tuple[int, str, list[str]]:
        """Wait for the end: the exit code, the output, and the lines on standard error."""
        output, errors = self.launcher.communicate(timeout=WAIT_S)
        return self.launcher.returncode, output, errors.splitlines()

    def log_folders(self) -> list[Path]:
        """The folders for logs that are there."""
        return list(self.temporary.glob("echelon-run-*"))
