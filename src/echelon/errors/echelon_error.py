"""The root of all errors of this library, and errors about calls, models and training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from echelon.errors.message_text import MAX_ROWS, by_value, rows_text

_Error = TypeVar("_Error", bound="EchelonError")


class EchelonError(Exception):
    """Base of everything that this library raises on purpose; can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # The constructors take facts, not the sentence, so the default would call them wrongly.
        return revive, (type(self), str(self), self.__dict__)

    @classmethod
    def revived(cls, name: str, message: str, facts: dict[str, object]) -> EchelonError | None:
        """The exception of the class ``name`` that another rank raised; None if there is none."""
        if cls.__name__ == name:
            return revive(cls, message, facts)
        found = (below.revived(name, message, facts) for below in cls.__subclasses__())
        return next((error for error in found if error is not None), None)


def revive(cls: type[_Error], message: str, facts: dict[str, object]) -> _Error:
    """Rebuild an exception in another process from its finished sentence and its facts."""
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(facts)
    return error


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
        problem: what is wrong, without the place.
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
        self.problem, self.rank, self.index = problem, rank, index
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


class DebuggerQuit(EchelonError):
    """A user has ended the run in the debugger.

    Attributes:
        rank: the rank that the debugger had stopped; None if it was no rank.
        place: the line in which it had stopped.
    """

    def __init__(self, rank: int | None, place: str) -> None:
        self.rank, self.place = rank, place
        who = "a thread that is no rank" if rank is None else f"rank {rank}"
        super().__init__(f"the run was ended in the debugger, which had stopped {who} at {place}")


class ModelMismatch(EchelonError):
    """The ranks of one group hold different models.

    Attributes:
        found: what each rank has, by rank.
    """

    def __init__(
        self,
        what: str,
        found: Mapping[int, str],
        do: str = "Build the same model on every rank.",
    ) -> None:
        self.found = dict(found)
        super().__init__(
            f"the models of the ranks differ in {what}:\n{rows_text(self.found)}\n{do}"
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
        rows = [f"  loss: {by_value(self.losses)}"] if losses else []
        shown = list(self.gradients.items())[:MAX_ROWS]
        rows += [f"  gradient of {name!r}: {by_value(found)}" for name, found in shown]
        if more := len(self.gradients) - len(shown):
            rows.append(f"  and the gradients of {more} more parameters")
        if self.norms:
            rows.append(f"  norm of the gradients: {by_value(self.norms)}")
        before = f", after {skipped} steps in a row that were skipped" if skipped else ""
        super().__init__(
            f"step {step} is not finite{before}:\n" + "\n".join(rows) + "\n"
            "No rank has taken it. Look at the batches of the ranks whose loss is named, or else "
            "at the learning rate and at divisions, logarithms and roots of the model."
        )
