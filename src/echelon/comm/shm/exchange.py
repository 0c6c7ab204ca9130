"""What all ranks know of an exchange before data moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class ExchangedParts:
    """The parts that ranks send to each other.

    Attributes:
        longest: elements of the longest part.
        addresses: ``addresses[src][dst]``: of the part for ``dst`` in the process of ``src``.
    """

    longest: int
    addresses: Sequence[Sequence[int]]
