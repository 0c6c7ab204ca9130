"""Fully sharded data parallelism: each rank keeps a part of every unit. See ``api``."""

from echelon.fsdp.api import FSDP
from echelon.fsdp.policy import MixedPrecision, Strategy

__all__ = ["FSDP", "MixedPrecision", "Strategy"]
