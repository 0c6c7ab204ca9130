"""Optimizers whose step needs more than one rank has of a model, which are refused.

Most optimizers update each element by itself, so a shard is updated as it would be in the unsharded
tensor. Those named here take norms of whole tensors, their rows and columns, or dot products over
all parameters. On shards they would silently train another model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum
from typing import final

from torch import nn
from torch.optim.optimizer import Optimizer

from echelon.errors import UnsupportedError
from echelon.modules.optimizer_hooks import (
    StepCheck,
    add_step_check,
    has_step_check,
    remove_step_check,
)

# By class name, as most of them are not torch's: what the step looks at.
_OVER_PARAMETERS = {"LBFGS": "all parameters of the model at once"}
_OVER_SHAPES = {
    **dict.fromkeys(("Adafactor", "Muon", "SOAP", "Shampoo"), "whole matrices"),
    **dict.fromkeys(("LAMB", "LARS", "Lamb", "Lars", "FusedLAMB"), "the norms of whole tensors"),
}


class Lacks(Enum):
    """What of a model the optimizers of a rank do not see, by which steps look at it."""

    PARAMETERS = _OVER_PARAMETERS
    TENSORS = _OVER_PARAMETERS | _OVER_SHAPES
    SHAPES = _OVER_SHAPES


@final
class _ElementwiseOnly(StepCheck):
    """Refuses the steps of optimizers that look beyond single elements."""

    def __init__(self, what: str, lacks: Lacks, *, owner: nn.Module | None) -> None:
        self._refused = lacks.value
        self._what = what
        self._owner = None if owner is None else weakref.ref(owner)

    def before_step(self, optimizer: Optimizer) -> None:
        names = (cls.__name__ for cls in type(optimizer).__mro__)
        name = next((name for name in names if name in self._refused), None)
        if name is None or (self._owner is not None and self._owner() is None):
            return
        raise UnsupportedError(
            f"a step of {name} looks at {self._refused[name]}, and {self._what}, so the ranks "
            "would train something else: use an optimizer that takes each element by itself, "
            "such as AdamW, or ec.DDP, where every rank has the whole model"
        )


def refuse_other_steps(
    params: Iterable[nn.Parameter], what: str, lacks: Lacks, *, owner: nn.Module | None = None
) -> None:
    """Refuse optimizers that look beyond single elements, when they step over ``params``.

    ``what`` is the reason, such as ``"FSDP shards parameters"``. Where this rank lacks parameters
    only, a stricter check that is there already stays. The check ends when ``owner`` is gone; None:
    with ``allow_other_steps``.
    """
    if lacks is Lacks.PARAMETERS:
        params = [param for param in params if not has_step_check(param, _ElementwiseOnly)]
    add_step_check(params, _ElementwiseOnly(what, lacks, owner=owner))


def allow_other_steps(params: Iterable[nn.Parameter]) -> None:
    """Allow all optimizers again: this rank has the whole model."""
    remove_step_check(params, _ElementwiseOnly)
