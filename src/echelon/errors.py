"""The exception tree. Each class takes facts and builds its sentence, so messages agree.

::

    EchelonError
    ├── ArgumentError (ValueError)      a call or an option that cannot be carried out
    │   ├── RankError                   a rank that is not in the group
    │   ├── ScheduleError               a pipeline schedule that cannot run
    │   └── UnsupportedError            a combination that this backend or technique does not have
    ├── StateError (RuntimeError)       the right call at the wrong time
    ├── ModelMismatch                   the ranks hold different models
    ├── StageError                      a stage of a pipeline raised
    ├── CheckpointError                 a checkpoint that could not be written or read
    │   ├── CheckpointNotFound          there is no committed checkpoint
    │   ├── CheckpointCorrupt           its bytes are not those that were written
    │   └── CheckpointMismatch          it is of another model, optimizer or state
    ├── NonFiniteError (FloatingPointError)  NaN or Inf in a loss or in gradients
    ├── WorldError                      a world that could not be started
    │   ├── SharedMemoryError           not enough shared memory
    │   └── StartMismatch               the ranks were started differently
    └── CommError                       ranks that fail to communicate
        ├── CollectiveMismatch          different collectives at one position
        ├── RankFailed                  another rank raised, left or died
        ├── DeadlockError               ranks that wait for one another
        └── CommTimeout (TimeoutError)  a rank that did not come in time
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, TypeVar

__all__ = [
    "ArgumentError",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CollectiveMismatch",
    "CommError",
    "CommTimeout",
    "DeadlockError",
    "EchelonError",
    "ModelMismatch",
    "NonFiniteError",
    "RankError",
    "RankFailed",
    "ScheduleError",
    "SharedMemoryError",
    "StageError",
    "StartMismatch",
    "StateError",
    "UnsupportedError",
    "WorldError",
]


class EchelonError(Exception):
    """Base of everything that this library raises on purpose; can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # The constructors take facts, not the sentence, so the default would call them wrongly.
        return _revive, (type(self), str(self), self.__dict__)

    @classmethod
    def revived(cls, name: str, message: str, facts: dict[str, object]) -> EchelonError | None:
        """The exception of the class ``name`` that another rank raised; None if there is none."""
        if cls.__name__ == name:
            return _revive(cls, message, facts)
        found = (below.revived(name, message, facts) for below in cls.__subclasses__())
        return next((error for error in found if error is not None), None)


_Error = TypeVar("_Error", bound=EchelonError)
_MOST_ROWS = 12  # of a message that lists names; a model has thousands


class ArgumentError(EchelonError, ValueError):
    """An argument or an option that cannot be carried out; raised before anything is done."""


class RankError(ArgumentError):
    """A rank that is not in the group."""

    def __init__(self, what: str, rank: object, size: int) -> None:
        super().__init__(
            f"{what} is {rank!r}, which is not in a group of {size} (need 0 <= rank < {size})"
        )


class ScheduleError(ArgumentError):
    """A pipeline schedule that cannot run, found before anything runs.

    Attributes:
        rank: whose list of actions it is; None where no single rank is at fault.
        index: the position in that list; None where something is missing from it.
        action: the action, in text form.
    """

    def __init__(
        self,
        problem: str,
        *,
        rank: int | None = None,
        index: int | None = None,
        action: object = None,
    ) -> None:
        self.rank, self.index = rank, index
        self.action = None if action is None else str(action)
        place = [] if rank is None else [f"rank {rank}"]
        if index is not None:
            place.append(f"index {index}")
        where = ", ".join(place)
        if self.action is not None:
            where += f" ({self.action})" if where else self.action
        super().__init__(f"the schedule cannot run: {where}{': ' if where else ''}{problem}")


class UnsupportedError(ArgumentError):
    """A combination that this backend or technique does not have."""


class StateError(EchelonError, RuntimeError):
    """The right call at the wrong time."""


class ModelMismatch(EchelonError):
    """The ranks of one group hold different models.

    Attributes:
        found: what each rank has, by rank.
    """

    def __init__(self, what: str, found: Mapping[int, str]) -> None:
        self.found = dict(found)
        super().__init__(
            f"the models of the ranks differ in {what}:\n{_rows(self.found)}\n"
            "Build the same model on every rank."
        )


class StageError(EchelonError):
    """A stage of a pipeline, or the loss, raised.

    Attributes:
        stage: which.
        microbatch: of which part of the batch; None for what is done for the whole stage.
    """

    def __init__(
        self,
        stage: int,
        microbatch: int | None,
        action: str,
        recent: Sequence[str],
        cause: BaseException,
    ) -> None:
        of = "" if microbatch is None else f" for microbatch {microbatch}"
        super().__init__(
            f"stage {stage} raised {type(cause).__name__}{of}, in action {action}: {cause}. "
            f"Its last actions: {' '.join(recent) or 'none'}"
        )
        self.stage, self.microbatch = stage, microbatch


class CheckpointError(EchelonError):
    """A checkpoint that could not be written or read.

    Attributes:
        path: of the file or folder.
        rank: the rank in the group on which it happened; None where it is the same on all.
        errno: of the operating system; None where it raised nothing.
    """

    def __init__(
        self, what: str, path: object, *, rank: int | None = None, errno: int | None = None
    ) -> None:
        self.path, self.rank, self.errno = str(path), rank, errno
        where = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{where}{self.path}: {what}")

    def on_rank(self, rank: int) -> Self:
        """The same, which happened on ``rank``."""
        found = _revive(type(self), f"rank {rank}: {self}", {**self.__dict__, "rank": rank})
        found.__cause__, found.__traceback__ = self.__cause__, self.__traceback__
        return found


class CheckpointNotFound(CheckpointError):
    """There is no committed checkpoint where one was asked for."""


class CheckpointCorrupt(CheckpointError):
    """The bytes of a checkpoint are not those that were written, or are no checkpoint.

    Attributes:
        tensor: whose bytes they are; None where they belong to no single tensor.
    """

    def __init__(
        self, what: str, path: object, *, tensor: str | None = None, rank: int | None = None
    ) -> None:
        super().__init__(what if tensor is None else f"{tensor!r}: {what}", path, rank=rank)
        self.tensor = tensor


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model, optimizer or state; nothing was changed.

    Attributes:
        missing: what the checkpoint does not have.
        unexpected: what it has and nothing here takes.
        differing: what does not fit, by name.
    """

    def __init__(
        self,
        path: object,
        missing: Sequence[str],
        unexpected: Sequence[str],
        differing: Mapping[str, str],
        *,
        rank: int | None = None,
    ) -> None:
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)
        self.differing = dict(differing)
        rows = [f"  missing: {name}" for name in self.missing]
        rows += [f"  unexpected: {name}" for name in self.unexpected]
        rows += [f"  {name}: {what}" for name, what in self.differing.items()]
        shown = rows[:_MOST_ROWS]
        if len(rows) > len(shown):
            shown.append(f"  and {len(rows) - len(shown)} more")
        super().__init__(
            "the checkpoint does not fit, and nothing was loaded:\n"
            + "\n".join(shown)
            + "\nBuild what was saved, or load with strict=False what fits.",
            path,
            rank=rank,
        )


class NonFiniteError(EchelonError, FloatingPointError):
    """A step whose loss or gradients have NaN or Inf on some rank.

    Attributes:
        step: its number.
        losses: the losses that are not finite, by rank in the job.
        gradients: what is not finite in them, by name of the parameter and rank in the job.
        norms: the norms of all gradients that are not finite although each gradient is, by rank.
        skipped: how many steps in a row before this one were not finite either, and left out.
    """

    def __init__(
        self,
        step: int,
        losses: Mapping[int, str],
        gradients: Mapping[str, Mapping[int, str]],
        norms: Mapping[int, str] | None = None,
        *,
        skipped: int = 0,
    ) -> None:
        self.step, self.skipped = step, skipped
        self.losses, self.norms = dict(losses), dict(norms or {})
        self.gradients = {name: dict(found) for name, found in gradients.items()}
        rows = [f"  loss: {_by_value(self.losses)}"] if losses else []
        shown = list(self.gradients.items())[:_MOST_ROWS]
        rows += [f"  gradient of {name!r}: {_by_value(found)}" for name, found in shown]
        if more := len(self.gradients) - len(shown):
            rows.append(f"  and the gradients of {more} more parameters")
        if self.norms:
            rows.append(f"  norm of the gradients: {_by_value(self.norms)}")
        before = f", after {skipped} steps in a row that were skipped" if skipped else ""
        super().__init__(
            f"step {step} is not finite{before}:\n" + "\n".join(rows) + "\n"
            "No rank has taken it. Look at the batches of the ranks whose loss is named, or else "
            "at the learning rate and at divisions, logarithms and roots of the model."
        )


class WorldError(EchelonError):
    """A world that could not be started."""


class SharedMemoryError(WorldError):
    """There is not enough shared memory for what was asked."""

    def __init__(self, what: str, needed: int, available: int) -> None:
        self.needed, self.available = needed, available
        super().__init__(
            f"{what} needs {needed / 2**20:.1f} MiB of shared memory and "
            f"{available / 2**20:.1f} MiB are available: "
            "use fewer ranks or a smaller model, free memory, or raise the container's limit"
        )


class StartMismatch(WorldError):
    """The ranks were started differently: other versions, threads or options.

    Attributes:
        field: the first thing that differs.
        found: what each rank has, by rank in the job.
    """

    def __init__(self, field: str, found: Mapping[int, str]) -> None:
        self.field, self.found = field, dict(found)
        super().__init__(
            f"the ranks were started differently: {field} is not the same:\n{_rows(self.found)}\n"
            "Start every rank with the same versions, OMP_NUM_THREADS and options."
        )


class CommError(EchelonError):
    """Ranks that fail to communicate."""


class CollectiveMismatch(CommError):
    """The ranks of one group issued different collectives at the same position.

    Attributes:
        calls: what each rank issued, by rank inside the group.
    """

    def __init__(self, group: str, position: int, calls: Mapping[int, str]) -> None:
        self.calls = dict(calls)
        super().__init__(
            f"collective #{position} of group {group!r} differs between ranks:\n"
            f"{_rows(self.calls)}\n"
            "All ranks of a group must issue the same collectives in the same order."
        )

    @classmethod
    def of_parts(cls, group: str, position: int, calls: Mapping[int, str]) -> Self:
        """Ranks that expect other parts of an all-to-all than their peers send."""
        message = (
            f"the parts of all_to_all_single #{position} of group {group!r} do not fit together:\n"
            f"{_rows(calls)}\n"
            "What rank s sends to rank r (input_splits[r] there) must be what r expects from s "
            "(output_splits[s])."
        )
        return _revive(cls, message, {"calls": dict(calls)})

    @classmethod
    def of_message(cls, group: str, calls: Mapping[int, str]) -> Self:
        """A send and a receive that found each other and do not fit."""
        rows = "\n".join(f"  rank {rank}: {text}" for rank, text in sorted(calls.items()))
        message = (
            f"a message in group {group!r} is received as something else than was sent:\n{rows}\n"
            "The receiver must give a tensor of the same dtype and number of elements."
        )
        return _revive(cls, message, {"calls": dict(calls)})


class RankFailed(CommError):
    """Another rank raised an exception, left or died while this one needed it.

    Attributes:
        failed_rank: rank of the one that failed, in the job.
    """

    def __init__(self, failed_rank: int, cause: str, doing: str) -> None:
        self.failed_rank, self.cause, self.doing = failed_rank, cause, doing
        super().__init__(f"rank {failed_rank} {cause}, while this rank was in {doing}")


class DeadlockError(CommError):
    """Ranks wait for one another and none of them can go on.

    Attributes:
        waits: for each rank that waits, the call it is in and the ranks that have not come.
    """

    def __init__(
        self, waits: Mapping[int, tuple[str, Sequence[int]]], finished: Iterable[int]
    ) -> None:
        self.waits = {rank: (call, tuple(missing)) for rank, (call, missing) in waits.items()}
        gone = sorted(finished)
        rows = "\n".join(
            f"  rank {rank} waits in {call} for {_ranks(missing)}"
            for rank, (call, missing) in sorted(self.waits.items())
        )
        left = f"\n  {_ranks(gone)} returned already" if gone else ""
        super().__init__(f"deadlock: no rank can go on\n{rows}{left}")


class CommTimeout(CommError, TimeoutError):
    """A rank did not come in time.

    Attributes:
        missing: the ranks (in the job) that were waited for.
    """

    def __init__(
        self, doing: str, missing: Sequence[int], seconds: float, others: str = ""
    ) -> None:
        self.missing = tuple(missing)
        tail = f"\n{others}" if others else ""
        super().__init__(f"{doing} waited {seconds:.1f} s for {_ranks(missing)} in vain{tail}")


def _revive(cls: type[_Error], message: str, facts: dict[str, object]) -> _Error:
    """Rebuild an exception in another process from its finished sentence and its facts."""
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(facts)
    return error


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 1, 2, 5``; long lists are cut."""
    if not ranks:
        return "other ranks"
    shown = ", ".join(map(str, ranks[:12])) + (", …" if len(ranks) > 12 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _rows(found: Mapping[int, str]) -> str:
    """One row a rank; those that are not like most are marked."""
    usual, _ = Counter(found.values()).most_common(1)[0]
    return "\n".join(
        f"  rank {rank}: {text}" + ("" if text == usual else "   <-- differs")
        for rank, text in sorted(found.items())
    )


def _by_value(found: Mapping[int, str]) -> str:
    """``nan on ranks 0, 2; inf on rank 1``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(found.items()):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_ranks(at)}" for value, at in ranks.items())
