"""Optimizers that need more for a step than what one rank has of a model.

Most steps take each element by itself, so that a part of a tensor is updated as the whole one would
be. Those named here take norms of whole tensors, their rows and columns, or dot products over all
parameters. With what one rank has, they would train another model, and say nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
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

# By their names, as most of them are not torch's: what each one looks at.
_OVER_PARAMETERS = {"LBFGS": "all parameters of the model at once"}
_OVER_TENSORS = {
    **_OVER_PARAMETERS,
    **dict.fromkeys(("Adafactor", "Muon", "SOAP", "Shampoo"), "whole matrices"),
    **dict.fromkeys(("LAMB", "LARS", "Lamb", "Lars", "FusedLAMB"), "the norms of whole tensors"),
}


@final
class _ElementwiseOnly(StepCheck):
    """Refuses the steps of optimizers that look beyond single elements."""

    def __init__(self, what: str, *, has_tensors: bool, owner: nn.Module | None) -> None:
        self._refused = _OVER_PARAMETERS if has_tensors else _OVER_TENSORS
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
    params: Iterable[nn.Parameter], what: str, *, has_tensors: bool, owner: nn.Module | None = None
) -> None:
    """Have optimizers refused, at a step over ``params``, that look beyond single elements.

    Args:
        params: of which some may be refused more by somebody else already, as shards are.
        what: has them, and how, such as ``"FSDP shards parameters"``.
        has_tensors: whether this rank has whole tensors, though not all of the model.
        owner: as long as it is there; None: until ``allow_other_steps``.
    """
    if has_tensors:
        params = [param for param in params if not has_step_check(param, _ElementwiseOnly)]
    add_step_check(params, _ElementwiseOnly(what, has_tensors=has_tensors, owner=owner))


def allow_other_steps(params: Iterable[nn.Parameter]) -> None:
    """This rank has ``params`` whole again, and all of their model."""
    remove_step_check(params, _ElementwiseOnly)
