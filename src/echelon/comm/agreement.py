"""Whether all ranks hold the same facts, and if not, the first difference and who has what.

A fact is a name with its value as text. Who gathers the facts of the ranks may do so in any way;
what differs is decided here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from echelon.errors import ModelMismatch

_ABSENT = "not there"

Facts: TypeAlias = Mapping[str, str]


class ObjectGatherer(Protocol):
    """Who compares: a ``Group``, or several as one."""

    def all_gather_object(self, item: Any) -> list[Any]:
        """The ``item`` of every rank, in the same order everywhere."""


def first_difference(facts: Sequence[Facts]) -> tuple[str, dict[int, str]] | None:
    """The first name whose values differ and the value of each rank; None if ranks agree.

    Args:
        facts: of each rank, by name. Their order does not matter.

    Example:
        >>> first_difference([{"lr": "0.1"}, {"lr": "0.1", "steps": "3"}])
        ('steps', {0: 'not there', 1: '3'})
    """
    for name in dict.fromkeys(name for of_rank in facts for name in of_rank):
        values = {rank: of_rank.get(name, _ABSENT) for rank, of_rank in enumerate(facts)}
        if len(set(values.values())) > 1:
            return name, values
    return None


def compare(
    kind: str, facts: Sequence[Facts], do: str = "Build the same model on every rank."
) -> None:
    """Refuse facts that are not the same, and in the same order, on all ranks.

    Args:
        kind: of facts, for the message: ``"option"``.
        facts: of each rank, by name.
        do: what the message tells the user to do.

    Raises:
        ModelMismatch: names the first difference and who has what.
    """
    if (difference := first_difference(facts)) is not None:
        name, values = difference
        raise ModelMismatch(f"{kind} {name!r}", values, do)
    for position, names in enumerate(zip(*facts, strict=True)):
        if len(set(names)) > 1:
            raise ModelMismatch(
                f"the order of their {kind}s, at position {position}",
                {rank: repr(name) for rank, name in enumerate(names)},
            )


def agree(ranks: ObjectGatherer, facts: Mapping[str, Facts], *, beside: Any = None) -> list[Any]:
    """Compare the facts of all ranks by kind, in one exchange of their hashes. All ranks call it.

    There is another exchange, of all facts, only if hashes differ.

    Args:
        facts: by kind and name; all ranks name the same kinds.
        beside: what else each rank has to say to the others in the same exchange.

    Returns:
        What each rank gave as ``beside``.

    Raises:
        ModelMismatch: the same one on every rank, see ``compare``.
    """
    mine = {kind: dict(of_kind) for kind, of_kind in facts.items()}
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).hexdigest()
    by_rank = ranks.all_gather_object((digest, beside))
    if len({theirs for theirs, _ in by_rank}) > 1:
        all_facts = ranks.all_gather_object(mine)
        for kind in mine:
            compare(kind, [of_rank[kind] for of_rank in all_facts])
    return [theirs for _, theirs in by_rank]
