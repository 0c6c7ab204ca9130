"""What a user may choose for DDP, refused at once where it cannot be carried out."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch

from echelon.errors import ArgumentError

__all__ = ["Init", "Options", "Reduction", "Sync"]

Sync = Literal["overlap", "manual"]
Init = Literal["broadcast", "verify", "trust"]
Reduction = Literal["mean", "sum"] | float


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of ``DDP``; the same on all ranks of its group.

    Attributes:
        bucket_bytes: cap of a bucket, on the wire.
        first_bucket_bytes: cap of the first bucket, which leaves first.
        sync: whether backward reduces gradients, or the user's call.
        broadcast_buffers: whether buffers that changed are made equal again.
        init: how parameters become equal at the start.
        gradient_dtype: dtype of gradients on the wire; None: the parameter's.
        reduction: ``"mean"``, ``"sum"``, or the number that a sum is divided by.
    """

    bucket_bytes: int
    first_bucket_bytes: int
    sync: Sync
    broadcast_buffers: bool
    init: Init
    gradient_dtype: torch.dtype | None
    reduction: Reduction

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "first_bucket_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ArgumentError(f"{name} is {value!r}; give a whole number of bytes >= 0")
        _one_of("sync", self.sync, ("overlap", "manual"))
        _one_of("init", self.init, ("broadcast", "verify", "trust"))
        _one_of("broadcast_buffers", self.broadcast_buffers, (True, False))
        dtype = self.gradient_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(
                f"gradient_dtype is {dtype!r}; give a floating point dtype such as torch.bfloat16"
            )
        self._check_reduction()

    def _check_reduction(self) -> None:
        value = self.reduction
        if value in ("mean", "sum"):
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < float(value) < math.inf:
            raise ArgumentError(
                f"reduction is {value!r}; use 'mean', 'sum' or the number > 0 that divides the sum"
            )

    def divisor(self, num_contributors: int) -> float:
        """What a sum over ranks is divided by.

        Args:
            num_contributors: ranks that have a batch of their own in this backward.
        """
        if self.reduction == "mean":
            return num_contributors
        return 1.0 if self.reduction == "sum" else float(self.reduction)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a gradient of ``dtype`` travels."""
        if self.gradient_dtype is None or dtype.is_complex:
            return dtype
        return self.gradient_dtype

    def facts(self) -> dict[str, str]:
        """Every option as text, for ranks to compare."""
        return {item.name: repr(getattr(self, item.name)) for item in fields(self)}


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"{name} is {value!r}; use one of {', '.join(map(repr, allowed))}")
