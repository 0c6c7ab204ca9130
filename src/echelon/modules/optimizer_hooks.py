"""Checks that run before each step of any optimizer over some parameters.

Optimizers do not know that a wrapper has sharded their parameters or put them into flat ones. So
torch's global pre-hook of ``step`` looks up here which checks the parameters of an optimizer have,
and runs each check once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from echelon.comm.compiler_bypass import bypass_compiler
from echelon.modules.plain_steps import closure_of, make_steps_plain


class StepCheck(ABC):
    """A check before a step over some parameters, which may refuse the step, or wait.

    It must not keep the owner of the parameters alive.

    Attributes:
        is_of_gradients: whether it looks at gradients. The closure of a step makes others, so such
            a check does not run before a step that has one (``plain_steps`` looks after it).
    """

    is_of_gradients = False

    @abstractmethod
    def before_step(self, optimizer: Optimizer) -> None:
        """Called once before each step of an optimizer that has at least one of the parameters."""


# The checks by parameter: at most one of each class.
_checks: WeakIdKeyDictionary = WeakIdKeyDictionary()
# By optimizer, the ids of its parameters at its last step, and their checks.
_known: WeakKeyDictionary[Optimizer, tuple[list[int], list[StepCheck]]] = WeakKeyDictionary()


def add_step_check(params: Iterable[nn.Parameter], check: StepCheck) -> None:
    """Run ``check`` before steps over ``params``; it replaces a check of the same class."""
    _register()
    _known.clear()  # an optimizer may have stepped before
    for param in params:
        _checks.setdefault(param, {})[type(check)] = check


def remove_step_check(params: Iterable[nn.Parameter], kind: type[StepCheck]) -> None:
    """Run no check of this class before steps over ``params`` any more."""
    _known.clear()
    for param in params:
        _checks.get(param, {}).pop(kind, None)


def has_step_check(param: nn.Parameter, kind: type[StepCheck]) -> bool:
    """Whether a check of this class runs before steps over ``param``."""
    return kind in _checks.get(param, {})


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


@bypass_compiler
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
    known, checks = _known.get(optimizer, ([], []))
    if ids != known:
        params = (param for group in optimizer.param_groups for param in group["params"])
        by_param = (_checks.get(param, {}).values() for param in params)
        checks = list(dict.fromkeys(check for checks in by_param for check in checks))
        _known[optimizer] = ids, checks
    has_closure = callable(closure_of(args, kwargs))
    for check in checks:
        if not (has_closure and check.is_of_gradients):
            check.before_step(optimizer)
    if checks:
        make_steps_plain(optimizer)
