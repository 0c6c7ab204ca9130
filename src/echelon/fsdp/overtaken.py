"""No optimizer writes parts that another rank still reads.

A backward that reduces needs all ranks, and comes after their last use of the parameters; so the
step that follows it overtakes nobody. But a forward may have no such backward: an evaluation
without ``no_grad``, or one under ``no_sync``. Then the ranks meet before the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from echelon.fsdp.hooks import Hooks

_Found = list[weakref.ref[Hooks]]

_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter, its model
_found: WeakKeyDictionary[Optimizer, tuple[int, _Found]] = WeakKeyDictionary()  # by its groups


def let_steps_wait(params: Iterable[nn.Parameter], hooks: Hooks) -> None:
    """Have the steps of optimizers over ``params`` wait for all forwards of their model."""
    _watch()
    _found.clear()  # an optimizer may have stepped before its model was wrapped
    owner = weakref.ref(hooks)
    for param in params:
        _owners[param] = owner


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_wait)


def _wait(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    num_groups, owners = _found.get(optimizer, (0, []))
    if num_groups != len(optimizer.param_groups):
        params = (param for group in optimizer.param_groups for param in group["params"])
        models = [_owners[param]() for param in params if param in _owners]
        owners = [weakref.ref(one) for one in dict.fromkeys(models) if one is not None]
        _found[optimizer] = len(optimizer.param_groups), owners
    for owner in owners:
        hooks = owner()
        if hooks is not None:
            hooks.await_forwards()
