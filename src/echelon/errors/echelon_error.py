"""The root of all errors of this library, and how they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

MOST_ROWS = 12  # of a message that lists names; a model has thousands
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


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 1, 2, 5``; long lists are cut."""
    if not ranks:
        return "other ranks"
    shown = ", ".join(map(str, ranks[:12])) + (", …" if len(ranks) > 12 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def rows_text(found: Mapping[int, str]) -> str:
    """One row a rank; those that are not like most are marked."""
    usual, _ = Counter(found.values()).most_common(1)[0]
    return "\n".join(
        f"  rank {rank}: {text}" + ("" if text == usual else "   <-- differs")
        for rank, text in sorted(found.items())
    )


def by_value(found: Mapping[int, str]) -> str:
    """``nan on ranks 0, 2; inf on rank 1``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(found.items()):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {ranks_text(at)}" for value, at in ranks.items())
