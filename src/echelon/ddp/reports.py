"""What a user can ask a ``DDP`` about its buckets and its last reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """Gradients that are reduced together, as a user can ask a ``DDP`` for them.

    Attributes:
        names: the names of their parameters, in the order of the buffer.
        dtype: the dtype in which they are reduced.
        nbytes: the size of the buffer, with padding and one flag for each gradient.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unused:
    """Parameters that got no gradient in the last reduction, as a user can ask a ``DDP`` for them.

    Attributes:
        here: those that got none on this rank.
        everywhere: those that got none on any rank; their ``.grad`` was left as it was.
    """

    here: tuple[str, ...]
    everywhere: tuple[str, ...]


class UnusedIndices(NamedTuple):
    """As ``Unused``, with the indices of the parameters."""

    here: list[int]
    everywhere: list[int]
