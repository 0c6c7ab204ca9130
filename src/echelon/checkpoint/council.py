"""The ranks that save or load together: what one of them cannot do, all of them raise.

Facts travel as JSON, never as pickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from echelon.errors import ArgumentError, CheckpointError, EchelonError
from echelon.world.group import Group

__all__ = ["Council", "translated"]


@final
class Council:
    """The ranks of a group, or one rank alone.

    Attributes:
        rank: of this one in the group.
        size: how many they are.
        world_rank: of this one in the job, as messages name it.
        path: of the checkpoint, for messages.
    """

    def __init__(self, group: Group | None, path: object) -> None:
        self.group, self.path = group, path
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size
        self.world_rank = 0 if group is None else group.ranks[group.rank]

    def all_do(self, what: str, step: Callable[[], Any]) -> list[Any]:
        """Run ``step`` on every rank and return what it gave on each, in rank order.

        Args:
            what: label of the exchange; ranks that do something else get ``CollectiveMismatch``.
            step: returns JSON.

        Raises:
            Exception: on every rank, if ``step`` raised on one: the error of the first such rank,
                which is named.
        """
        found, problem = None, None
        try:
            found = step()
        except Exception as error:  # it is raised below, on all ranks
            problem = translated(error, self.world_rank)
        facts = self._gather([None if problem is None else _told(problem), found], what)
        for rank, (told, _) in enumerate(facts):
            if told is not None:
                if rank == self.rank:
                    assert problem is not None
                    raise problem
                raise _heard(told, self._world_rank_of(rank), self.path) from problem
        return [found for _, found in facts]

    def check_alike(self, asked: Sequence[Mapping[str, Any]], calls: str) -> None:
        """Refuse ranks that are asked for different things.

        Args:
            asked: by rank.
            calls: what these are.

        Raises:
            ArgumentError: on every rank; names the first difference and who has what.
        """
        for key, first in asked[0].items():
            found = {rank: one.get(key) for rank, one in enumerate(asked)}
            if any(value != first for value in found.values()):
                rows = "\n".join(
                    f"  rank {self._world_rank_of(rank)}: {value}" for rank, value in found.items()
                )
                raise ArgumentError(
                    f"the ranks are asked for different {calls}; {key}:\n{rows}\n"
                    "All ranks make the same call."
                )

    def _gather(self, fact: Any, what: str) -> list[Any]:
        if self.group is None:
            return [fact]
        data = json.dumps(fact, separators=(",", ":")).encode()
        return [json.loads(one) for one in self.group.all_gather_bytes(data, label=what)]

    def _world_rank_of(self, rank: int) -> int:
        return rank if self.group is None else self.group.ranks[rank]


def translated(error: Exception, rank: int) -> Exception:
    """An error of the operating system as one that names rank, path and errno; others as is."""
    if isinstance(error, CheckpointError) and error.rank is None:
        error = error.on_rank(rank)
    if not isinstance(error, OSError) or isinstance(error, EchelonError):
        return error
    found = CheckpointError(
        f"{error.strerror or error} (errno {error.errno})",
        error.filename,
        rank=rank,
        errno=error.errno,
    )
    found.__cause__ = error
    return found


def _told(error: Exception) -> dict[str, Any]:
    """An exception as JSON."""
    facts = {name: value for name, value in vars(error).items() if _is_json(value)}
    return {"type": type(error).__name__, "text": str(error), "facts": facts}


def _heard(told: dict[str, Any], rank: int, path: object) -> Exception:
    """The exception of another rank."""
    error = EchelonError.revived(told["type"], told["text"], told["facts"])
    if error is None:  # one of the user's code, whose class this rank may not have
        return CheckpointError(f"raised {told['type']}: {told['text']}", path, rank=rank)
    error.add_note(f"raised on rank {rank}")
    return error


def _is_json(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    return value is None or isinstance(value, str | int | float)
