"""Optimizers that need more for a step than what one rank has of a model.

Most steps take each element by itself, so that a part of a tensor is updated as the whole one would
be. Those named here take norms of whole tensors, their rows and columns, or dot products over all
parameters. With what one rank has, they would train another model, and say nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from echelon.errors import UnsupportedError

# By their names, as most of them are not torch's: what each one looks at.
_OVER_PARAMETERS = {"LBFGS": "all parameters of the model at once"}
_OVER_TENSORS = {
    **_OVER_PARAMETERS,
    **dict.fromkeys(("Adafactor", "Muon", "SOAP", "Shampoo"), "whole matrices"),
    **dict.fromkeys(("LAMB", "LARS", "Lamb", "Lars", "FusedLAMB"), "the norms of whole tensors"),
}

# By parameter: what is refused, why, and whether that holds still.
_limits: WeakIdKeyDictionary = WeakIdKeyDictionary()


def refuse_other_steps(
    params: Iterable[nn.Parameter], what: str, *, has_tensors: bool, owner: nn.Module | None = None
) -> None:
    """Have optimizers refused, at a step over ``params``, that look beyond single elements.

    Args:
        params: of which some may be refused more by somebody else already, as parts are.
        what: has them, and how, such as ``"FSDP gives ranks parts"``.
        has_tensors: whether this rank has whole tensors, though not all of the model.
        owner: as long as it is there; None: until ``allow_other_steps``.
    """
    _watch()
    found = None if owner is None else weakref.ref(owner)

    def is_there() -> bool:
        return found is None or found() is not None

    for param in params:
        if not (has_tensors and param in _limits):
            _limits[param] = _OVER_PARAMETERS if has_tensors else _OVER_TENSORS, what, is_there


def allow_other_steps(params: Iterable[nn.Parameter]) -> None:
    """This rank has ``params`` whole again, and all of their model."""
    for param in params:
        _limits.pop(param, None)


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    if not any(name in _OVER_TENSORS for name in names):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            refused, what, is_there = _limits.get(param, ({}, "", bool))
            name = next((name for name in names if name in refused), None)
            if name is not None and is_there():
                raise UnsupportedError(
                    f"a step of {name} looks at {refused[name]}, and {what}, so the ranks would "
                    "train something else: use an optimizer that takes each element by itself, "
                    "such as AdamW, or ec.DDP, where every rank has the whole model"
                )
