"""The default group of ``torch.distributed``, for libraries that look for one."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from echelon.c10d.named_process_group import BACKEND

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start_default_group(timeout_s: float) -> None:
    """Make this backend the default group of a job of several ranks, unless there is one.

    All ranks call it. It does nothing in a process that no launcher has started.
    """
    if dist.is_initialized() or any(name not in os.environ for name in _RENDEZVOUS):
        return
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=timeout_s))
