"""``echelon ps`` and ``echelon look``: what the ranks of jobs on this host do now.

The flight recorder of a job is memory that its launcher (or its first rank) holds, so jobs are
found by their descriptors in ``/proc``, and reading disturbs no rank. Torch is not imported.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from echelon.cli.output import say
from echelon.diagnosis import stacks
from echelon.diagnosis.flight_recorder import RECORDER_NAME, FlightRecorder, Phase, RankStatus
from echelon.launch.program import Launch
from echelon.process.command_words import masked
from echelon.process.process_status import ProcessStatus, resident_nbytes

_HEADS = ("rank", "pid", "step", "memory", "does", "last call")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A job with at least one rank on this host that has begun its record.

    Attributes:
        pid: of the process that holds the flight recorder; it names the job.
        command: of the program that the ranks run, without secrets.
        statuses: of the ranks of the newest attempt on this host, in rank order.
    """

    pid: int
    command: str
    statuses: Sequence[RankStatus]

    def lines(self, width: int | None = None) -> list[str]:
        """The job as a headline and one row for each rank; two, if one is wider than ``width``."""
        rows = [_HEADS, *(_cells(status) for status in self.statuses)]
        headline = f"job {self.pid}: {self.command}"
        lines = _table(rows)
        if width is not None and max(map(len, lines)) > width:
            heads, *lines = _table([row[:-1] for row in rows])
            calls = [f"    last call: {row[-1]}" for row in rows[1:]]
            lines = [heads, *(line for pair in zip(lines, calls, strict=True) for line in pair)]
        return [headline, *lines]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def running_jobs() -> list[RunningJob]:
    """The jobs of this user on this host, by pid."""
    jobs: dict[int, RunningJob] = {}  # by the inode of the memory, which a job's ranks hold too
    for pid in _oldest_first(_processes()):
        for inode, path in _recorders(pid):
            if inode in jobs:
                continue
            try:
                recorder = FlightRecorder.open(path)
            except OSError:  # it has ended meanwhile, or is another user's
                continue
            statuses = _newest(recorder)
            if statuses and not all(status.ended for status in statuses):
                jobs[inode] = RunningJob(pid=pid, command=_command(pid), statuses=statuses)
    return sorted(jobs.values(), key=lambda job: job.pid)


def show_jobs() -> int:
    """Print all jobs; 0, also where there is none."""
    jobs = running_jobs()
    if not jobs:
        say("no job of yours runs on this host; simulated ranks are not seen from outside")
    for job in jobs:
        say("\n".join(job.lines(_width())))
    return 0


def show_job(pid: int, *, with_stacks: bool) -> int:
    """Print the job that a process or one of its ranks belongs to; 1 if there is none."""
    for job in running_jobs():
        if pid == job.pid or pid in [status.pid for status in job.statuses]:
            lines = job.lines(_width())
            if with_stacks:
                answers = stacks.ask(job.statuses)
                lines += [stacks.shown(answers)] if answers else []
                silent = [str(s.rank) for s in job.statuses if s.rank not in answers]
                if silent:
                    lines.append(f"no stack could be had of ranks {', '.join(silent)}")
            say("\n".join(lines))
            return 0
    say(f"process {pid} is neither a job nor a rank of one: echelon ps lists them")
    return 1


def _width() -> int | None:
    """The columns of the terminal; None where the output is no terminal's."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _oldest_first(pids: Iterable[int]) -> list[int]:
    """Processes by when they were started: a rank's number may be below that of its launcher.

    A system begins again with low numbers when it has given out its highest.
    """
    started = [(status.start_ticks, pid) for pid in pids if (status := ProcessStatus.of(pid))]
    return [pid for _, pid in sorted(started)]


def _recorders(pid: int) -> Iterable[tuple[int, str]]:
    """The inodes and paths of the flight recorders that a process holds."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it has ended, or is another user's
        return
    for descriptor in descriptors:
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            if os.readlink(path) == f"/memfd:{RECORDER_NAME} (deleted)":
                yield os.stat(path).st_ino, path
        except OSError:  # closed meanwhile
            continue


def _newest(recorder: FlightRecorder) -> list[RankStatus]:
    statuses = [record.read() for record in recorder.rank_records]
    begun = [status for status in statuses if status is not None]
    newest = max((status.attempt for status in begun), default=0)
    return sorted((s for s in begun if s.attempt == newest), key=lambda status: status.rank)


def _cells(status: RankStatus) -> tuple[str, ...]:
    nbytes = resident_nbytes(status.pid)
    return (
        str(status.rank),
        str(status.pid),
        str(status.step),
        "-" if nbytes is None else f"{nbytes / 2**20:,.0f} MiB",
        _doing(status),
        status.call or "none",
    )


def _doing(status: RankStatus) -> str:
    if status.phase is Phase.STARTING and not status.ended:
        return "is in echelon.init()"
    return replace(status, gave_up_on=None).doing  # it may do something else since


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "(ended)"
    text = shlex.join(masked(Launch.program_words(words.rstrip("\0").split("\0"))))
    return text if len(text) <= 100 else f"…{text[-99:]}"  # the script and its options are last
