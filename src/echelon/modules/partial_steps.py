"""Steps of optimizers over parts of a model, which are refused if they need more than the parts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from echelon.errors import UnsupportedError
from echelon.modules.optimizer_hooks import (
    StepCheck,
    add_step_check,
    has_step_check,
    remove_step_check,
)
from echelon.modules.optimizer_trial import KNOWN, LOSS, Cut, why_parts_differ
from echelon.modules.plain_steps import after_load

_ELEMENTWISE = "use an optimizer that takes each element by itself, such as AdamW"

# By optimizer, its parameters when it was tried, and the verdicts by its options.
_Verdicts = dict[tuple[Cut, tuple[Any, ...]], str | None]
_tried: WeakKeyDictionary[Optimizer, tuple[list[list[int]], _Verdicts]] = WeakKeyDictionary()
_NUMBERS = (int, float)
_PLAIN = (*_NUMBERS, str, type(None), torch.dtype)


@final
class _NeedsNoMore(StepCheck):
    """Refuses the steps of optimizers that look at more than what a rank has."""

    def __init__(self, what: str, cut: Cut, *, owner: nn.Module | None) -> None:
        self._what, self._cut = what, cut
        self._owner = None if owner is None else weakref.ref(owner)
        self._key = what, cut, None if owner is None else id(owner)

    # Equal checks of the units of one model run once before a step, and not once for each unit.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NeedsNoMore) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def before_step(self, optimizer: Optimizer) -> None:
        if self._owner is not None and self._owner() is None:
            return
        needs = _needs(optimizer, self._cut)
        if needs is None:
            return
        name = type(optimizer).__name__
        advice = f"{_ELEMENTWISE}, or ec.DDP, where every rank has the whole model"
        if needs == LOSS:
            advice = f"call step() without a closure where it allows that, or {_ELEMENTWISE}"
        elif self._cut is Cut.ELEMENTS and _needs(optimizer, Cut.ROWS) is None:
            advice = (
                "wrap with layout='rows', whose shards have the rows that it needs, or ec.DDP, "
                "where every rank has the whole model"
            )
        raise UnsupportedError(
            f"a step of {name} looks at {needs}, and {self._what}, so the ranks would train "
            f"something else: {advice}"
        )


def _needs(optimizer: Optimizer, cut: Cut) -> str | None:
    """What ``optimizer`` needs beyond its parts, tried once for its parameters and options."""
    if type(optimizer) in KNOWN:
        return None
    ids = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    known = _tried.get(optimizer)
    if known is None:
        after_load(optimizer, _forget)
    if known is None or known[0] != ids:
        known = _tried[optimizer] = ids, {}
    verdicts, key = known[1], (cut, _options(optimizer))
    if key not in verdicts:
        verdicts[key] = why_parts_differ(optimizer, cut)
    return verdicts[key]


def _options(optimizer: Optimizer) -> tuple[Any, ...]:
    """The options of the groups and of the optimizer itself, of numbers no more than the kind.

    What a step looks at depends on whether a number is 0, negative or infinite, so a schedule that
    changes it in each step means no trial in each.
    """
    options = [option for group in optimizer.param_groups for option in group.items()]
    return tuple(
        [
            (name, (item > 0, item < 0, item - item == 0) if isinstance(item, _NUMBERS) else item)
            for name, value in chain(options, vars(optimizer).items())
            for item in (value if isinstance(value, tuple) else (value,))
            if isinstance(item, _PLAIN)
        ]
    )


def _forget(optimizer: Optimizer) -> None:
    _tried[optimizer] = [], {}


def refuse_other_steps(
    params: Iterable[nn.Parameter], what: str, cut: Cut, *, owner: nn.Module | None = None
) -> None:
    """Refuse optimizers that need more than what ``cut`` leaves, when they step over ``params``.

    ``what`` is the reason, such as ``"FSDP shards parameters"``. Where this rank lacks parameters
    only, a stricter check that is there already stays. The check ends when ``owner`` is gone; None:
    with ``allow_other_steps``.
    """
    if cut is Cut.PARAMETERS:
        params = [param for param in params if not has_step_check(param, _NeedsNoMore)]
    add_step_check(params, _NeedsNoMore(what, cut, owner=owner))


def allow_other_steps(params: Iterable[nn.Parameter]) -> None:
    """Allow all optimizers again: this rank has the whole model."""
    remove_step_check(params, _NeedsNoMore)
