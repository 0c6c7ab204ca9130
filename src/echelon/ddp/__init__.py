"""Replicate one model on all ranks of a group and reduce its gradients while backward runs."""

from echelon.ddp.api import DDP

__all__ = ["DDP"]
