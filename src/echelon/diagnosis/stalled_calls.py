"""Which ranks hold up a collective that a device does not finish, from what each has issued. Pure.

Where a device carries out the collectives, the host of a rank goes on, and no call of it waits.
So a rank that waits in vain knows only that some of its calls are not done. What all ranks have
issued tells the rest: the first such call that a rank has not issued, or has issued differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CheckpointCorrupt
from echelon.values.untrusted_json import read_json

_MAX_NBYTES = 2**26  # that reading the answer of a rank may take


class IssuedCall(NamedTuple):
    """A collective that a rank has given to its device.

    Attributes:
        position: among the collectives of its group.
        signature: what the ranks must agree on.
        place: the line of user code.
    """

    position: int
    signature: str
    place: str

    @classmethod
    def of(cls, call: CollectiveCall) -> Self:
        """The facts of a call."""
        return cls(call.position, str(call.signature), str(call.place))

    def __str__(self) -> str:
        return f"{self.signature} at {self.place}"


class Stall(NamedTuple):
    """What holds up the device of a rank.

    Attributes:
        call: the first collective that cannot be done; None: all ranks have issued all of them.
        different: what each rank has issued in its place, where they differ.
        missing: ranks that have not issued it.
        silent: ranks of which nothing is known.
    """

    call: IssuedCall | None
    different: dict[int, str]
    missing: tuple[int, ...]
    silent: tuple[int, ...]


def find_stall(
    pending: Sequence[IssuedCall], issued: Mapping[int, Sequence[IssuedCall] | None]
) -> Stall:
    """Find what holds up ``pending``, the calls of this rank that may not be done.

    Args:
        issued: by rank in the job, the last calls of each rank of the group, in their order; None:
            it did not say.

    Example:
        >>> calls = [IssuedCall(i, "all_reduce", "train.py:3") for i in range(3)]
        >>> find_stall(calls[1:], {0: calls, 1: calls[:2], 2: calls}).missing
        (1,)
    """
    silent = tuple(rank for rank, calls in issued.items() if calls is None)
    known = {rank: calls for rank, calls in issued.items() if calls is not None}
    for call in pending:
        at = {rank: _at(call.position, calls) for rank, calls in known.items()}
        there = {rank: other for rank, other in at.items() if other is not None}
        if len({other.signature for other in there.values()}) > 1:
            return Stall(call, {rank: str(other) for rank, other in there.items()}, (), silent)
        missing = tuple(
            rank for rank, calls in known.items() if not calls or calls[-1].position < call.position
        )
        if missing:
            return Stall(call, {}, missing, silent)
    return Stall(pending[0] if silent and pending else None, {}, (), silent)


def _at(position: int, calls: Sequence[IssuedCall]) -> IssuedCall | None:
    return next((call for call in calls if call.position == position), None)


def dump(calls: Mapping[str, Iterable[IssuedCall]]) -> str:
    """The last calls by group, as JSON."""
    return json.dumps({group: list(of_group) for group, of_group in calls.items()})


def load(data: bytes, group: str) -> list[IssuedCall] | None:
    """The calls of ``group`` in what another rank has dumped; None if that is something else."""
    try:
        read: Any = read_json(data, "what a rank has issued", memory=_MAX_NBYTES)
        rows = read.get(group, [])
        return [IssuedCall(int(position), str(call), str(place)) for position, call, place in rows]
    except (CheckpointCorrupt, ValueError, TypeError, AttributeError):
        return None
