"""Comparison of facts between ranks: the first difference, and the value of each rank.

A fact is a name with its value as text. The functions that compare do not communicate, so callers
may gather the facts of the ranks in any way; ``agree`` gathers them through a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from echelon.errors import ModelMismatch

_ABSENT = "not there"

Facts: TypeAlias = Mapping[str, str]


class ObjectGatherer(Protocol):
    """A ``Group``, or several groups as one."""

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the ``item`` of every rank, in the same order on all ranks."""


def first_difference(facts: Sequence[Facts]) -> tuple[str, dict[int, str]] | None:
    """The first name whose values differ and the value of each rank; None if ranks agree.

    The order of the names does not matter.

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
    """Raise ``ModelMismatch`` unless all ranks have the same facts in the same order.

    ``kind`` names the facts in the message, as in ``"option"``, which ends with the advice ``do``.
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
    """Compare facts over a group, and return what each rank passed as ``beside``.

    All ranks call it with the same kinds of facts, and raise the same ``ModelMismatch``. They
    exchange hashes with ``beside``, and all facts only if hashes differ.
    """
    by_kind = {kind: dict(of_kind) for kind, of_kind in facts.items()}
    digest = hashlib.blake2b(repr(by_kind).encode(), digest_size=16).hexdigest()
    by_rank = ranks.all_gather_object((digest, beside))
    if len({digest_of_rank for digest_of_rank, _ in by_rank}) > 1:
        all_facts = ranks.all_gather_object(by_kind)
        for kind in by_kind:
            compare(kind, [of_rank[kind] for of_rank in all_facts])
    return [beside_of_rank for _, beside_of_rank in by_rank]
