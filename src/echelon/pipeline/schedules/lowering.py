"""Schedules are lowered once for all simulated ranks of a process, which all ask at one time."""

from __future__ import annotations

import threading
from functools import lru_cache

from echelon.pipeline.schedules.ir import Schedule
from echelon.pipeline.schedules.passes import lower

_lock = threading.Lock()


def lower_once(
    schedule: Schedule, gather: tuple[int, ...] | None, window_nbytes: int | None, reduce: bool
) -> Schedule:
    """What ``lower`` gives for these arguments."""
    with _lock:
        return _lower(schedule, gather, window_nbytes, reduce)


@lru_cache(maxsize=16)
def _lower(
    schedule: Schedule, gather: tuple[int, ...] | None, window_nbytes: int | None, reduce: bool
) -> Schedule:
    return lower(schedule, gather=gather, window_nbytes=window_nbytes, reduce=reduce)
