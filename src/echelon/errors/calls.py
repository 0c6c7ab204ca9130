"""Calls and options that cannot be carried out."""

from __future__ import annotations

from echelon.errors.echelon_error import EchelonError


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
