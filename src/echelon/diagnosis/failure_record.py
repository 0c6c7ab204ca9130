"""How a failed rank tells its launcher what happened: one small JSON file, and how it reads.

The file has the fields that torchrun's agent looks for in the file it names in
``TORCHELASTIC_ERROR_FILE``, and beside them the facts that name the cause. This module imports
neither torch nor anything that does, so that a launcher can read records at once.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from echelon.errors import (
    CheckpointError,
    CollectiveMismatch,
    CommError,
    CommTimeout,
    DeadlockError,
    RankFailed,
)
from echelon.errors.printable import message_of

STACKS_FILE = "{}-stacks.txt"  # beside the file of a record, with its name

# Of these, the first one set names the file; torchrun sets the second in every rank.
VARIABLES = ("ECHELON_ERROR_FILE", "TORCHELASTIC_ERROR_FILE")

_NOT_THE_USERS = (
    str(Path(__file__).resolve().parent.parent) + os.sep,
    os.path.dirname(os.__file__) + os.sep,  # Python's own modules, and mostly what is installed
    "<frozen",
    "<string>",  # as of multiprocessing's server
)
# Enough to see that a peer is gone, wherever this rank was; the agent waits longer before it kills.
_LAST_WORDS_S = 1.5
_MAX_MESSAGE = 4000  # characters; a message may hold a tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRecord:
    """What ended one rank.

    Attributes:
        rank: in the job.
        type: class name of the exception.
        message: its sentence.
        place: the innermost line of user code, ``train.py:12 in main``; empty where there is none.
        traceback: as Python prints it.
        time_s: when, in seconds since the epoch.
        follows: whether it only reports what another rank has met, or that communication broke
            because another rank failed.
        failed_rank: the rank that this one names as failed, or waited for in vain, if it does.
        where: how far the rank had come, ``at step 4``; empty where that is not known.
        stuck: what the rank was found to do that was waited for in vain; empty where that is not
            known.
        doing: the call in which this one waited in vain.
        seconds: how long it did.
        stacks: of all ranks of the host, where this one waited in vain.
    """

    rank: int
    type: str
    message: str
    place: str
    traceback: str
    time_s: float
    follows: bool = False
    failed_rank: int | None = None
    where: str = ""
    stuck: str = ""
    doing: str = ""
    seconds: float = 0.0
    stacks: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int, where: str = "") -> FailureRecord:
        """The record of ``error`` raised on ``rank``."""
        more: dict[str, Any] = {}
        if isinstance(error, RankFailed):
            more["failed_rank"] = error.failed_rank
        elif isinstance(error, CommTimeout):
            more["failed_rank"] = next(iter([*error.stuck, *error.missing]), None)
            more["stuck"] = next(iter(error.stuck.values()), "")
            more["doing"], more["seconds"] = error.doing, error.seconds
            more["stacks"] = "\n".join(getattr(error, "__notes__", ()))
        return cls(
            rank=rank,
            type=type(error).__name__,
            message=_cut(message_of(error)),
            place=_place(error),
            traceback="".join(traceback.format_exception(error)),
            time_s=time.time(),
            follows=is_heard(error, rank)
            or (
                isinstance(error, CommError)
                and not isinstance(error, CollectiveMismatch | DeadlockError)
            ),
            where=where,
            **more,
        )

    @property
    def headline(self) -> str:
        """One line: the rank, where it was, the exception and the first line of its message.

        Of a rank that waited in vain, the rank that held it up comes first.
        """
        if self.doing and self.failed_rank is not None:
            stuck = self.stuck or "did not come"
            if self.failed_rank == self.rank:
                return (
                    f"rank {self.rank} {stuck}; others have left, and it had "
                    f"{self.seconds:.1f} s to follow"
                )
            waited = f"rank {self.rank} waited {self.seconds:.1f} s for it"
            return f"rank {self.failed_rank} {stuck}; {waited}"
        first = self.message.strip().split("\n", 1)[0]
        subject = f"rank {self.rank} {self.where}".rstrip()
        return f"{subject} raised {self.type}" + (f": {first}" if first else "")

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the record, of which a reader sees all or nothing, and beside it the stacks."""
        facts = asdict(self)
        torchrun = {
            "message": f"{self.type}: {self.message}",
            "extraInfo": {"py_callstack": self.traceback, "timestamp": str(int(self.time_s))},
        }
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"message": torchrun, "echelon": facts}))
        part.replace(target)
        if self.stacks:
            target.with_name(STACKS_FILE.format(target.stem)).write_text(self.stacks)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FailureRecord | None:
        """The record in a file; None where there is none of ours."""
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError):
            return None  # not written, or written by something else
        facts = content.get("echelon") if isinstance(content, dict) else None
        return cls(**facts) if isinstance(facts, dict) else None


def is_heard(error: BaseException, rank: int) -> bool:
    """Whether ``error``, raised on ``rank``, is of a save or load that failed on another rank."""
    return isinstance(error, CheckpointError) and error.rank not in (None, rank)


def error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where this rank's launcher wants its record, or None where nobody asked."""
    for name in VARIABLES:
        if environ.get(name):
            return Path(environ[name])
    return None


def ends_process(owner: int) -> bool:
    """Whether what ``sys.excepthook`` is called for ends the process ``owner``.

    multiprocessing calls it, too, for its thread that serves files to others, mostly in a fork of
    a rank that loads data for it.
    """
    return os.getpid() == owner and threading.current_thread() is threading.main_thread()


def install_failure_record(
    path: str | os.PathLike[str], rank: int, where: Callable[[], str] = lambda: ""
) -> Callable[[], None]:
    """Write a record to ``path`` when an exception ends this process.

    Python's own report of the exception still follows. A second call replaces the first one's
    path and rank.

    Args:
        where: says how far the rank has come.

    Returns:
        a function that takes the hook out again.
    """
    before, owner = sys.excepthook, os.getpid()

    def record_and_report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if ends_process(owner) and not issubclass(kind, KeyboardInterrupt):
            try:
                FailureRecord.of(error, rank, where()).write(path)
            except OSError as problem:  # the exception itself must still be seen
                print(f"cannot write the failure record {path}: {problem}", file=sys.stderr)
        before(kind, error, trace)

    def remove() -> None:
        if sys.excepthook is record_and_report:
            sys.excepthook = before

    sys.excepthook = record_and_report
    return remove


def outlive_termination(seconds: float = _LAST_WORDS_S) -> None:
    """Let the first SIGTERM end this process only after some ``seconds``.

    When a rank is killed, torchrun ends all others within a tenth of a second: before they have
    seen that a peer is gone, and can say in which call they needed it. Does nothing where the
    script, or another thread than the main one, decides about the signal.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    owner = os.getpid()

    def end_soon(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        if os.getpid() != owner:  # a fork of this process, such as a worker that loads data
            os.kill(os.getpid(), number)
        timer = threading.Timer(seconds, os.kill, (owner, number))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, end_soon)
    # On the way out a signal must not change the exit code: the agent may already see a follower.
    atexit.register(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))


def _cut(message: str) -> str:
    """``message``, shortened in the middle where it is very long."""
    if len(message) <= _MAX_MESSAGE:
        return message
    half = _MAX_MESSAGE // 2
    return f"{message[:half]} … {message[-half:]}"


def is_user_file(path: str) -> bool:
    """Whether a file of Python code is neither of this package, nor Python's own, nor installed."""
    return not path.startswith(_NOT_THE_USERS) and f"{os.sep}site-packages{os.sep}" not in path


def _place(error: BaseException) -> str:
    """The innermost frame of the user's code."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
