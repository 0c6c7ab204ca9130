"""The lists that a pipeline runs, made once for all simulated ranks of a process."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import lru_cache

from echelon.pipeline.ir import Action, Item, Kind, Schedule
from echelon.pipeline.passes import lower

__all__ = ["forwards_of", "lower_once"]

_lock = threading.Lock()


def lower_once(
    schedule: Schedule, gather: tuple[int, ...] | None, window_nbytes: int | None, reduce: bool
) -> Schedule:
    """``lower``, and the same again for whoever asks for the same.

    Simulated ranks ask at one time, and would each do all of it under one interpreter's lock.
    """
    with _lock:
        return _lowered(schedule, gather, window_nbytes, reduce)


@lru_cache(maxsize=16)
def _lowered(
    schedule: Schedule, gather: tuple[int, ...] | None, window_nbytes: int | None, reduce: bool
) -> Schedule:
    return lower(schedule, gather=gather, window_nbytes=window_nbytes, reduce=reduce)


def forwards_of(schedule: Schedule, microbatches: int) -> Schedule:
    """Forwards only, on the placement of ``schedule``: a wave through all stages after another."""
    orders: list[list[Item]] = [[] for _ in range(schedule.num_ranks)]
    waves = sorted(
        (i + stage, stage, i) for stage in range(schedule.num_stages) for i in range(microbatches)
    )
    for _, stage, i in waves:
        orders[schedule.placement[stage]].append(Action(Kind.F, i, stage))
    return replace(
        schedule,
        name="forward-only",
        num_microbatches=microbatches,
        orders=tuple(map(tuple, orders)),
    )
