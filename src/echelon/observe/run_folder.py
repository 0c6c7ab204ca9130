"""The folder of a run: a new one, or that of the job that its launcher has restarted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from echelon.errors import ArgumentError, StateError, WorldError
from echelon.observe.metrics import read_metrics
from echelon.process.environment import environment

_JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_MOST = 10_000  # folders of one name


@dataclass(frozen=True, kw_only=True)
class JobAttempt:
    """Which start of which job this is.

    Attributes:
        job: its name; empty where no launcher has given one.
        number: how often the launcher has restarted it.
    """

    job: str = ""
    number: int = 0

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Self:
        """What the variables of a launcher say."""
        try:
            job = environment(env)
        except WorldError:  # simulated ranks do not read these variables, so they may be wrong
            job = None
        if job is None:
            return cls()
        name = next((env[variable] for variable in _JOBS if env.get(variable)), "")
        return cls(job=name, number=job.attempt)


@dataclass(frozen=True, kw_only=True)
class MetricsFolder:
    """Where a run is written.

    Attributes:
        path: it exists.
        is_continued: whether it has the lines of an attempt before this one.
    """

    path: Path
    is_continued: bool

    @classmethod
    def take(cls, wanted: Path, attempt: JobAttempt) -> Self:
        """The folder of the same job, or the first of ``folder``, ``folder-2`` … that is free."""
        path = wanted
        for trial in range(1, _MOST):
            path = wanted if trial == 1 else wanted.with_name(f"{wanted.name}-{trial}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if _is_of(path, attempt):
                    return cls(path=path, is_continued=True)
                continue
            except OSError as error:
                raise ArgumentError(
                    f"cannot make the folder {path} for this run: {error.strerror}"
                ) from error
            return cls(path=path, is_continued=False)
        raise StateError(f"{wanted} and its numbered successors all exist; choose another name")


def _is_of(path: Path, attempt: JobAttempt) -> bool:
    """Whether the run in ``path`` is an attempt of the same job that has not come to its end."""
    if not attempt.job or attempt.number == 0:
        return False
    try:
        lines = read_metrics(path)
    except ArgumentError:  # no run, or one of another format: leave it alone
        return False
    starts = [line for line in lines if line["kind"] == "start"]
    if not starts or any(line["kind"] == "end" for line in lines):
        return False
    last = starts[-1]
    return last.get("job") == attempt.job and last.get("attempt", 0) < attempt.number
