"""The options of ``DDP``; one that cannot be carried out is refused when it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from echelon import checks
from echelon.checks import Reduction
from echelon.modules.model_agreement import Init

Sync = Literal["overlap", "manual"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DDPOptions:
    """The options of ``DDP``; the same on all ranks of its group.

    Law: the constructor of ``DDP`` has an argument of the same name, type and default for each.

    Attributes:
        bucket_bytes: the cap of every bucket, in bytes of gradients as they are sent.
        first_bucket_bytes: one more cap of the first bucket, which is launched first.
        sync: whether backward reduces gradients, or a call of the user.
        broadcast_buffers: whether buffers that changed are made equal again.
        init: how parameters become equal at the start.
        gradient_dtype: the dtype in which gradients are reduced; None: the parameter's.
        reduction: ``"mean"``, ``"sum"``, or the number that a sum is divided by.
        check_replicas: after how many reductions parameters of ranks are compared; 0: never.
    """

    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    sync: Sync = "overlap"
    broadcast_buffers: bool = True
    init: Init = "broadcast"
    gradient_dtype: torch.dtype | None = None
    reduction: Reduction = "mean"
    check_replicas: int = 64

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "first_bucket_bytes", "check_replicas"):
            checks.integer(name, getattr(self, name))
        checks.one_of("sync", self.sync, get_args(Sync))
        checks.one_of("init", self.init, get_args(Init))
        checks.flag("broadcast_buffers", self.broadcast_buffers)
        checks.floating("gradient_dtype", self.gradient_dtype)
        checks.reduction(self.reduction)

    def divisor(self, num_contributors: int) -> float:
        """What a sum is divided by, if ``num_contributors`` ranks have a batch in this backward."""
        if self.reduction == "mean":
            return num_contributors
        return 1.0 if self.reduction == "sum" else float(self.reduction)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a gradient of ``dtype`` is reduced."""
        if self.gradient_dtype is None or dtype.is_complex:
            return dtype
        return self.gradient_dtype
