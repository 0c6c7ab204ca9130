"""Fully sharded data parallelism: each rank keeps a part of every unit. See ``api``."""

from echelon.fsdp.api import FSDP
from echelon.fsdp.policy import MixedPrecision, Offload, Strategy
from echelon.fsdp.prefetch import BackwardPrefetch

__all__ = ["FSDP", "BackwardPrefetch", "MixedPrecision", "Offload", "Strategy"]
