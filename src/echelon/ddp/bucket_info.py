"""What a user can ask a ``DDP`` about its buckets and its last reduction."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """Gradients that are reduced together.

    Attributes:
        names: their parameters, in the order of the buffer.
        dtype: in which they travel.
        nbytes: size of the buffer, with padding and one flag a gradient.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unused:
    """Parameters that got no gradient in the last reduction.

    Attributes:
        here: on this rank.
        everywhere: on no rank; their ``.grad`` was left as it was.
    """

    here: tuple[str, ...]
    everywhere: tuple[str, ...]
