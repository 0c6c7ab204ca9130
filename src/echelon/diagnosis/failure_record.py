"""Why one rank stopped, as plain data that it leaves for its launcher and the other ranks.

A rank that fails leaves one record: in a file for its launcher, in the store for ranks on other
hosts. A launcher makes the record of a process that could not do so itself. ``root_cause`` says
which of several records is the first, and ``failure_report`` prints it.

The file has the fields that torchrun's agent looks for in the file it names in
``TORCHELASTIC_ERROR_FILE``, and beside them the record. This module imports neither torch nor
anything that does, so that a launcher can read records at once.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from echelon.diagnosis.stacks import is_user_file
from echelon.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CollectiveMismatch,
    CommError,
    CommTimeout,
    DeadlockError,
    ModelMismatch,
    RankFailed,
    StartMismatch,
)
from echelon.errors.message_text import message_of, printable, without_middle
from echelon.process.atomic_files import replace_file
from echelon.process.process_end import exit_code_of
from echelon.values.untrusted_json import read_json

if TYPE_CHECKING:
    from echelon.diagnosis.collective_call import CollectiveCall

STACKS_FILE = "{}-stacks.txt"  # beside the file of a record, with its name

_DISAGREEMENTS = {
    error.__name__ for error in (CollectiveMismatch, DeadlockError, ModelMismatch, StartMismatch)
}
_OF_ANOTHER = {error.__name__ for error in (CommError, CommTimeout, RankFailed)}
_CALLBACK = "Got the following error when running the callback: "  # torch's own words
_MAX_MESSAGE = 4000  # characters; a message may hold a tensor
_MAX_NBYTES = 1 << 26  # that reading a record may take


class Reason(Enum):
    """Why a rank stopped."""

    DIED = "its process was killed, or crashed"
    RAISED = "an exception ended it"
    EXITED = "its process ended by itself, without an exception that it told of"
    TIMEOUT = "it waited for another rank in vain"
    LOST = "another rank failed, which it lost or heard of"
    LEFT = "it closed its world"
    ENDED = "its launcher ended it, because another rank had failed"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRecord:
    """Why one rank stopped.

    Attributes:
        rank: in the job.
        reason: kind of end.
        type: class name of the exception; empty where there was none.
        message: its sentence.
        place: the innermost line of user code, ``train.py:12 in main``; empty where there is none.
        traceback: as Python prints it.
        time_s: when, in seconds since the epoch.
        where: how far the rank had come, ``at step 4``; empty where that is not known.
        failed_rank: the rank that this one names as failed, or waited for in vain, if it does.
        cause: what it says of that rank.
        stuck: what that rank was found to do, if it was waited for in vain and could be looked at.
        doing: the call in which this one waited in vain, with position and place.
        seconds: how long it did.
        stacks: of all ranks of the host, where this one waited in vain.
        group: of the call in which it stopped; empty if in none.
        position: of that call in the group.
        call: text of what the ranks must agree on.
        op: name of the method of that call, ``"all_reduce"``; empty if in none.
        content: text of what the two ends of a send and a receive must agree on: dtype, shape, tag.
        is_p2p: whether it was a send or a receive, which have positions of their own.
        sends: elements for each rank of the group, where ranks may differ in them.
        expects: elements from each rank of the group, likewise.
        missing: ranks in the job that it waited for or lost.
        exit_code: of a process that ended without a record of its own; negative for a signal.
        log: what such a process has written to standard error.
    """

    rank: int
    reason: Reason
    type: str = ""
    message: str = ""
    place: str = ""
    traceback: str = ""
    time_s: float = 0.0
    where: str = ""
    failed_rank: int | None = None
    cause: str = ""
    stuck: str = ""
    doing: str = ""
    seconds: float = 0.0
    stacks: str = ""
    group: str = ""
    position: int = -1
    call: str = ""
    op: str = ""
    content: str = ""
    is_p2p: bool = False
    sends: tuple[int, ...] = ()
    expects: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    exit_code: int | None = None
    log: str = ""

    # Making records -----------------------------------------------------------------------------

    @classmethod
    def of(cls, error: BaseException, rank: int, where: str = "") -> FailureRecord:
        """The record of ``error`` raised on ``rank``, or of what it follows."""
        error = origin_of(error)
        facts: dict[str, Any] = {}
        kind, message = _of_callback(type(error).__name__, message_of(error))
        if isinstance(error, RankFailed):
            facts["failed_rank"], facts["cause"] = error.failed_rank, error.cause
        elif isinstance(error, CommTimeout):
            facts["failed_rank"] = next(iter([*error.stuck, *error.missing]), None)
            facts["stuck"] = next(iter(error.stuck.values()), "")
            facts["doing"], facts["seconds"] = error.doing, error.seconds
            facts["stacks"] = "\n".join(getattr(error, "__notes__", ()))
        return cls(
            rank=rank,
            reason=_reason_of(error, rank),
            type=kind,
            message=without_middle(message, _MAX_MESSAGE),
            place=_place(error),
            traceback="".join(traceback.format_exception(error)),
            time_s=time.time(),
            where=where,
            **facts,
        )

    @classmethod
    def of_call(
        cls,
        call: CollectiveCall,
        *,
        late: bool,
        missing: Sequence[int],
        seconds: float,
        sends: Sequence[int] = (),
        expects: Sequence[int] = (),
    ) -> FailureRecord:
        """The record of a rank that waited in vain (``late``) or lost a peer in this call."""
        is_p2p = call.signature.op in ("send", "recv")
        return cls(
            rank=call.rank,
            reason=Reason.TIMEOUT if late else Reason.LOST,
            time_s=time.time(),
            doing=str(call),
            group=call.group,
            position=call.position,
            call=str(call.signature),
            op=call.signature.op,
            content=str(call.signature._replace(op="message", root=None)) if is_p2p else "",
            place=str(call.place),
            is_p2p=is_p2p,
            sends=tuple(sends),
            expects=tuple(expects),
            missing=tuple(missing),
            seconds=seconds,
        )

    @classmethod
    def of_process(
        cls, rank: int, exit_code: int, *, was_signaled: bool, where: str = "", log: str = ""
    ) -> FailureRecord:
        """The record of a process that ended with a code other than 0 and left no record itself.

        Args:
            was_signaled: whether its launcher had asked it to end; a process that ended with a code
                may have done so by itself meanwhile.
        """
        reason = Reason.EXITED if exit_code > 0 else Reason.ENDED if was_signaled else Reason.DIED
        return cls(rank=rank, reason=reason, exit_code=exit_code, where=where, log=log)

    # Reading records ----------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether it only reports the failure of another rank."""
        return self.reason in (Reason.TIMEOUT, Reason.LOST)

    @property
    def is_disagreement(self) -> bool:
        """Whether ranks differ in what must be the same; then each raises, and none is to blame."""
        return is_disagreement(self.type)

    @property
    def first_line(self) -> str:
        """The first line of the message."""
        return self.message.strip().partition("\n")[0]

    @property
    def headline(self) -> str:
        """One line that names the rank, where it was, and what happened to it.

        If this rank waited in vain, the line begins with the rank that held it up. If ranks
        disagree, it names none.
        """
        subject = f"rank {self.rank} {self.where}".rstrip()
        if self.reason is Reason.TIMEOUT and self.failed_rank is not None:
            stuck = self.stuck or "did not come"
            if self.failed_rank == self.rank:
                return (
                    f"rank {self.rank} {stuck}; others have left, and it had "
                    f"{self.seconds:.1f} s to follow"
                )
            waited = f"rank {self.rank} waited {self.seconds:.1f} s for it"
            return f"rank {self.failed_rank} {stuck}; {waited}"
        if self.type:
            first = self.first_line
            if self.is_disagreement:
                return f"{f'the ranks disagree {self.where}'.rstrip()}: {self.type}: {first}"
            return f"{subject} raised {self.type}" + (f": {first}" if first else "")
        if not self.exit_code:
            return f"{subject} exited with code 0 while others were waiting"
        return f"{subject} {exit_text(self.exit_code)}"

    def call_text(self) -> str:
        """The call with everything that ranks may disagree on, and its place."""
        lengths = f", sends {list(self.sends)}, expects {list(self.expects)} elements"
        return f"{self.call}{lengths if self.sends else ''} at {self.place}"

    # As text and in files -----------------------------------------------------------------------

    def dump(self) -> str:
        """As JSON."""
        return json.dumps({**asdict(self), "reason": self.reason.name})

    @classmethod
    def load(cls, text: bytes, rank: int | None = None) -> FailureRecord | None:
        """The record from the text of ``dump``; None if it is no record, or not of ``rank``.

        Anybody may have written the text into a store without authentication. So each field must
        have its type, and control characters for a terminal are made harmless.
        """
        return cls._of_facts(_read_json(text), rank)

    @classmethod
    def _of_facts(cls, facts: object, rank: int | None = None) -> FailureRecord | None:
        kinds = {field.name: str(field.type) for field in fields(cls)}
        if not isinstance(facts, dict) or facts.keys() != kinds.keys():
            return None
        try:
            record = cls(**{name: _CHECKS[kind](facts[name]) for name, kind in kinds.items()})
        except (ValueError, KeyError):
            return None
        return record if rank in (None, record.rank) else None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the record atomically, and the stacks into a file beside it."""
        torchrun = {
            "message": f"{self.type}: {self.message}",
            "extraInfo": {"py_callstack": self.traceback, "timestamp": str(int(self.time_s))},
        }
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = f'{{"message": {json.dumps(torchrun)}, "echelon": {self.dump()}}}'
        replace_file(target, content.encode(), sync=False)
        if self.stacks:
            stacks = target.with_name(STACKS_FILE.format(target.stem))
            replace_file(stacks, self.stacks.encode("utf-8", "backslashreplace"), sync=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FailureRecord | None:
        """The record in a file; None if the file is missing or holds no record."""
        try:
            content = _read_json(Path(path).read_bytes())
        except OSError:
            return None  # not written
        return cls._of_facts(content.get("echelon")) if isinstance(content, dict) else None


def origin_of(error: BaseException) -> BaseException:
    """What ``error`` follows: a failure of a group, or the exception by which ranks came to differ.

    In ``except`` and ``finally`` a rank issues other calls than those that go on, and after a
    failure calls fail in their turn.
    """
    if not isinstance(error, Exception):  # it ends the rank on purpose
        return error
    chain: list[BaseException] = []
    before: BaseException | None = error
    while before is not None and not any(before is other for other in chain):
        chain.append(before)
        cause = None if isinstance(before, RankFailed) else before.__cause__  # of another rank
        before = cause or before.__context__
    # What has come through no code of the user, this library or torch has handled itself.
    chain[1:] = [before for before in chain[1:] if _place(before)]
    of_groups = [i for i, each in enumerate(chain) if _is_of_group(each)]
    if not of_groups:
        return error
    first = of_groups[-1]
    return chain[first + 1] if _differs(chain[first]) and chain[first + 1 :] else chain[first]


def is_of_another(name: str) -> bool:
    """Whether errors of the class of this name tell what another rank did, or did not do."""
    return name in _OF_ANOTHER


def is_disagreement(name: str) -> bool:
    """Whether errors of the class of this name say that ranks differ in what must be the same."""
    return name in _DISAGREEMENTS


def is_heard(error: BaseException, rank: int) -> bool:
    """Whether ``error``, raised on ``rank``, is of a save or load that failed on another rank."""
    return isinstance(error, CheckpointError) and error.rank not in (None, rank)


def cause_of(error: BaseException) -> str:
    """What a rank did that failed with ``error``, or before it, as other ranks read after its name.

    Example:
        >>> cause_of(ValueError("boom")), cause_of(KeyboardInterrupt()), cause_of(SystemExit(3))
        ('raised ValueError: boom', 'raised KeyboardInterrupt', 'exited with code 3')
    """
    if isinstance(error, SystemExit):
        return exit_text(exit_code_of(error))
    error = origin_of(error)
    return f"raised {type(error).__name__}: {message_of(error)}".removesuffix(": ")


def exit_text(exit_code: int) -> str:
    """How a process ended, as it reads after its name; a negative code stands for a signal."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-exit_code}"


def _of_callback(kind: str, message: str) -> tuple[str, str]:
    """The class and message of a disagreement that a callback of a future has raised, if it is one.

    PyTorch raises it again as a RuntimeError, around the text of the first one and its stack.

    Example:
        >>> text = "Got the following error when running the callback: DeadlockError: a circle"
        >>> _of_callback("RuntimeError", f"{text}\\n\\nAt:\\n  train.py(3): main")
        ('DeadlockError', 'a circle')
        >>> _of_callback("RuntimeError", "Got the following error")
        ('RuntimeError', 'Got the following error')
    """
    text = message.strip()
    while text.startswith(_CALLBACK):
        text = text.removeprefix(_CALLBACK).removeprefix("RuntimeError: ")
    name, _, rest = text.partition("\n\nAt:\n")[0].partition(": ")
    return (name, rest) if name in _DISAGREEMENTS else (kind, message)


def _differs(error: BaseException) -> bool:
    """Whether it says that ranks disagree, as this one or another has found."""
    if isinstance(error, RankFailed):
        return error.cause.removeprefix("raised ").partition(":")[0] in _DISAGREEMENTS
    return _of_callback(type(error).__name__, message_of(error))[0] in _DISAGREEMENTS


def _is_of_group(error: BaseException) -> bool:
    return isinstance(error, CommError) or _differs(error)


def _reason_of(error: BaseException, rank: int) -> Reason:
    if isinstance(error, CommTimeout):
        return Reason.TIMEOUT
    reports_peer = isinstance(error, CommError) and is_of_another(type(error).__name__)
    return Reason.LOST if reports_peer or is_heard(error, rank) else Reason.RAISED


def _place(error: BaseException) -> str:
    """The innermost frame of the user's code."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _read_json(text: bytes) -> object:
    """The value of a text that somebody else may have written; None if it is no harmless JSON."""
    try:
        return read_json(text, "a failure record", memory=_MAX_NBYTES)
    except CheckpointCorrupt:
        return None


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError
    return value


# By the annotation of a field: its value from JSON.
_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda value: _exactly(int, value),
    "float": lambda value: float(_exactly(float, value) if type(value) is not int else value),
    "bool": lambda value: _exactly(bool, value),
    "str": lambda value: printable(_exactly(str, value)),
    "int | None": lambda value: None if value is None else _exactly(int, value),
    "tuple[int, ...]": lambda value: tuple(_exactly(int, item) for item in _exactly(list, value)),
    "Reason": lambda value: Reason[_exactly(str, value)],
}
