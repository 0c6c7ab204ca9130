"""The ranks that save or load together: what one of them cannot do, all of them raise.

Facts travel as JSON, never as pickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from echelon.comm.group import Group
from echelon.errors import ArgumentError, CheckpointError, EchelonError
from echelon.errors.message_text import message_of


@final
class Coordinator:
    """The ranks of a group, or one rank alone.

    Attributes:
        group: None for one rank alone.
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

    def run_on_all(
        self, what: str, step: Callable[[], Any], asked: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Run ``step`` on every rank and return what it gave on each, in rank order.

        Args:
            what: label of the exchange; ranks that do something else get ``CollectiveMismatch``.
            step: returns JSON.
            asked: what the user asks of this rank, as JSON; all ranks must be asked for the same.

        Raises:
            ArgumentError: on every rank, if they are asked for different things.
            Exception: on every rank, if ``step`` raised on one: the error of the first such rank,
                which is named.
        """
        found, problem = None, None
        try:
            found = step()
        except Exception as error:  # it is raised below, on all ranks
            problem = named(error, None if self.group is None else self.world_rank)
        label = what if asked is None else f"{what}, which all ranks make"
        facts = self._gather(
            [asked, None if problem is None else _error_as_json(problem), found], label
        )
        if asked is not None:
            self._check_alike([one[0] for one in facts], what)
        for rank, (_, told, _) in enumerate(facts):
            if told is not None:
                if rank == self.rank:
                    assert problem is not None
                    raise problem
                raise _error_from_json(told, self._world_rank_of(rank), self.path) from problem
        return [found for _, _, found in facts]

    def give(self, what: str, read: Callable[[], bytes]) -> bytes:
        """The bytes that ``read`` gives on the first rank, on all ranks.

        Raises:
            Exception: on every rank, what ``read`` raised.
        """
        data = b""

        def step() -> None:
            nonlocal data
            if self.rank == 0:
                data = read()

        self.run_on_all(what, step)
        if self.group is None:
            return data
        return self.group.all_gather_bytes(data, label=f"bytes of {what}")[0]

    def _check_alike(self, asked: Sequence[Mapping[str, Any] | None], what: str) -> None:
        """Refuse ranks that are asked for different things; name the first one and who has what."""
        for key, first in (asked[0] or {}).items():
            found = {rank: (one or {}).get(key) for rank, one in enumerate(asked)}
            if any(value != first for value in found.values()):
                rows = "\n".join(
                    f"  rank {self._world_rank_of(rank)}: {value}" for rank, value in found.items()
                )
                raise ArgumentError(
                    f"the ranks differ in {what}; {key}:\n{rows}\nAll ranks make the same call."
                )

    def _gather(self, fact: Any, what: str) -> list[Any]:
        if self.group is None:
            return [fact]
        data = json.dumps(fact, separators=(",", ":")).encode()
        return [json.loads(one) for one in self.group.all_gather_bytes(data, label=what)]

    def _world_rank_of(self, rank: int) -> int:
        return rank if self.group is None else self.group.ranks[rank]


def named(error: Exception, rank: int | None) -> Exception:
    """An error of the operating system as one of ours; errors of ours with the rank they are of.

    Args:
        rank: in the job; None for one that is alone.
    """
    if isinstance(error, OSError) and not isinstance(error, EchelonError):
        found: Exception = CheckpointError(
            f"{error.strerror or error} (errno {error.errno})", error.filename, errno=error.errno
        )
        found.__cause__ = error
        error = found
    if rank is None:
        return error
    if isinstance(error, CheckpointError):
        return error if error.rank is not None else error.on_rank(rank)
    if isinstance(error, EchelonError):
        same = EchelonError.revived(type(error).__name__, f"rank {rank}: {error}", vars(error))
        if same is not None:
            same.__cause__, same.__traceback__ = error.__cause__, error.__traceback__
            return same
    return error


def _error_as_json(error: Exception) -> dict[str, Any]:
    """An exception as JSON."""
    facts = {name: value for name, value in vars(error).items() if _is_json(value)}
    return {"type": type(error).__name__, "text": message_of(error), "facts": facts}


def _error_from_json(data: dict[str, Any], rank: int, path: object) -> Exception:
    """The exception of another rank."""
    error = EchelonError.revived(data["type"], data["text"], data["facts"])
    if error is None:  # one of the user's code, whose class this rank may not have
        error = CheckpointError(f"raised {data['type']}: {data['text']}", path, rank=rank)
    return error


def _is_json(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    return value is None or isinstance(value, str | int | float)
