"""Where torch and Python begin an activity that this library does not see otherwise.

Backward, the next batch of a ``DataLoader``, the steps of optimizers, and garbage collections. For
the first two torch has no hooks, so a function of each is replaced while any rank is measured.
"""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from echelon.diagnosis import rank_time
from echelon.diagnosis.step_rows import Activity
from echelon.process.replacement import Installation, Replacement


def _measured(owner: Any, name: str, activity: int) -> Replacement:
    """What measures a function that torch looks up in a namespace."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        before = rank_time.begin(activity)
        try:
            return replacement.original(*args, **kwargs)
        finally:
            rank_time.end(before)

    replacement = Replacement(owner, name, measured)
    return replacement


def _measured_loading() -> Replacement:
    """What measures the next batch of a loader, and notes the end of a pass that trains."""

    def measured(iterator: Any) -> Any:
        before, rows = rank_time.begin(int(Activity.LOADING)), rank_time.rows()
        first = 0 if rows is None else vars(iterator).setdefault(_FIRST_STEP, rows.num_steps)
        try:
            return replacement.original(iterator)
        except StopIteration:
            if rows is not None and rows.num_steps > first:
                rows.end_epoch(rows.num_steps)
            raise
        finally:
            rank_time.end(before)

    replacement = Replacement(_BaseDataLoaderIter, "__next__", measured)
    return replacement


_FIRST_STEP = "_echelon_first_step"  # of an iterator: how many steps were made before its first
_REPLACEMENTS = (
    _measured(torch.autograd, "_engine_run_backward", int(Activity.BACKWARD)),
    _measured_loading(),
)


def _install() -> None:
    for replacement in _REPLACEMENTS:
        replacement.put_in()
    if _collected not in gc.callbacks:
        gc.callbacks.append(_collected)


def _remove() -> None:
    for replacement in _REPLACEMENTS:
        replacement.take_out()
    gc.callbacks.remove(_collected)


_hooks = Installation(_install, _remove)


def install() -> None:
    """Have the activities of one more rank seen."""
    _listen_to_optimizers()
    _hooks.begin()


def remove() -> None:
    """Undo what ``install`` has done, with the last rank."""
    _hooks.end()


@cache  # one hook for all ranks of a process, however many worlds it has
def _listen_to_optimizers() -> None:
    register_optimizer_step_pre_hook(_begin_step)
    register_optimizer_step_post_hook(_end_step)


def _begin_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # it would trace the clock
        return
    if (rank := rank_time.current()) is not None:
        rank.before_step = rank.begin(Activity.OPTIMIZER)


def _end_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (rank := rank_time.current()) is not None:
        rank.end(rank.before_step)


def _collected(phase: str, info: dict[str, int]) -> None:
    if (rank := rank_time.current()) is None:
        return
    if phase == "start":
        rank.before_collection = rank.begin(rank.collecting)
    else:
        rank.end(rank.before_collection)
