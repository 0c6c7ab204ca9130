"""The ranks that save or load together: an error on one of them is raised on all.

Facts travel as JSON, never as pickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from echelon.comm.agreement import first_difference
from echelon.comm.group import Group
from echelon.errors import ArgumentError, CheckpointError, EchelonError
from echelon.errors.message_text import message_of


@final
class Coordinator:
    """The ranks of a group, or one rank alone.

    Attributes:
        group: the ranks; None for one rank alone.
        rank: this rank's number in the group.
        size: the number of ranks.
        world_rank: this rank's number in the job, which messages use.
        path: of the checkpoint, for messages.
    """

    def __init__(self, group: Group | None, path: object) -> None:
        self.group, self.path = group, path
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size
        self.world_rank = 0 if group is None else group.ranks[group.rank]

    def run_on_all(
        self, what: str, step: Callable[[], Any], request: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Run ``step``, which returns JSON, on every rank; its results in rank order.

        Args:
            what: label of the exchange; ranks that do something else get ``CollectiveMismatch``.
            request: what the user asks of this rank, as JSON; all ranks must be asked for the same.

        Raises:
            ArgumentError: on every rank, if they are asked for different things.
            Exception: on every rank, if ``step`` raised on one: the error of the first such rank,
                which is named.
        """
        result, error = self._outcome(step)
        label = what if request is None else f"{what}, which all ranks make"
        report = {"request": request, "error": _error_as_json(error), "result": result}
        reports = self._gather(report, label)
        if request is not None:
            self._check_alike([report["request"] for report in reports], what)
        self._raise_first([report["error"] for report in reports], error)
        return [report["result"] for report in reports]

    def collect_on_first(self, what: str, step: Callable[[], Any]) -> list[Any] | None:
        """Run ``step`` on every rank; its results in rank order on the first one, None on others.

        For results that are long: on 1,000 ranks nobody but the first parses those of all.

        Raises:
            Exception: as ``run_on_all``.
        """
        result, error = self._outcome(step)
        self._raise_first(self._gather(_error_as_json(error), f"errors of {what}"), error)
        if self.group is None:
            return [result]
        parts = self.group.gather_bytes(_dumped(result), label=what)
        return None if parts is None else [json.loads(part) for part in parts]

    def _outcome(self, step: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """What ``step`` returned, or the error that it raised, which all ranks raise then."""
        try:
            return step(), None
        except Exception as error:
            return None, named(error, None if self.group is None else self.world_rank)

    def _raise_first(self, errors: Sequence[Any], raised: Exception | None) -> None:
        """Raise the first error of the ranks, which are JSON; this rank's was ``raised``."""
        for rank, error in enumerate(errors):
            if error is not None:
                if rank == self.rank:
                    assert raised is not None
                    raise raised
                raise _error_from_json(error, self._world_rank_of(rank), self.path) from raised

    def run_on_first(self, what: str, step: Callable[[], Any]) -> Any:
        """Run ``step``, which returns JSON, on the first rank; its result, on all ranks.

        Raises:
            Exception: on every rank, what ``step`` raised.
        """
        return self.run_on_all(what, step if self.rank == 0 else lambda: None)[0]

    def broadcast_bytes(self, what: str, read: Callable[[], bytes]) -> bytes:
        """Call ``read`` on the first rank; the bytes that it returned, on all ranks.

        Raises:
            Exception: on every rank, what ``read`` raised.
        """
        data = b""

        def step() -> None:
            nonlocal data
            data = read()

        self.run_on_first(what, step)
        if self.group is None:
            return data
        return self.group.all_gather_bytes(data, label=f"bytes of {what}")[0]

    def _check_alike(self, requests: Sequence[Mapping[str, Any]], what: str) -> None:
        """Refuse ranks that are asked for different things; name the first and who has what."""
        difference = first_difference(
            [{key: str(value) for key, value in request.items()} for request in requests]
        )
        if difference is not None:
            key, values = difference
            rows = "\n".join(
                f"  rank {self._world_rank_of(rank)}: {value}" for rank, value in values.items()
            )
            raise ArgumentError(
                f"the ranks differ in {what}; {key}:\n{rows}\nAll ranks make the same call."
            )

    def _gather(self, fact: Any, what: str) -> list[Any]:
        if self.group is None:
            return [fact]
        return [json.loads(part) for part in self.group.all_gather_bytes(_dumped(fact), label=what)]

    def _world_rank_of(self, rank: int) -> int:
        return rank if self.group is None else self.group.ranks[rank]


def named(error: Exception, rank: int | None) -> Exception:
    """The error with the rank that raised it; an ``OSError`` becomes a ``CheckpointError``.

    Args:
        rank: in the job; None for one rank alone, which is not named.
    """
    if isinstance(error, OSError) and not isinstance(error, EchelonError):
        text = f"{error.strerror or error} (errno {error.errno})"
        ours = CheckpointError(text, error.filename, errno=error.errno)
        ours.__cause__ = error
        error = ours
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


def _dumped(fact: Any) -> bytes:
    return json.dumps(fact, separators=(",", ":")).encode()


def _error_as_json(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    facts = {name: value for name, value in vars(error).items() if _is_json(value)}
    return {"type": type(error).__name__, "text": message_of(error), "facts": facts}


def _error_from_json(data: dict[str, Any], rank: int, path: object) -> Exception:
    """An exception like the one of another rank, of the same class if it is one of echelon's."""
    error = EchelonError.revived(data["type"], data["text"], data["facts"])
    if error is None:  # raised by the user's code, whose class may not exist on this rank
        error = CheckpointError(f"raised {data['type']}: {data['text']}", path, rank=rank)
    return error


def _is_json(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    return value is None or isinstance(value, str | int | float)
