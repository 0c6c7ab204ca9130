"""Parameters of a model that optimizers must not see, because they see a flat one instead.

Their ``.grad`` is None outside of backward, so an optimizer over them would do nothing and say
nothing. Torch calls hooks before each step of any optimizer; ours looks at each optimizer once for
every number of groups it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from echelon.errors import StateError
from echelon.fsdp.storage import Storage

_hidden: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter, the name of the flat one
_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # how many groups were looked at


def hide(params: Iterable[nn.Parameter], *, behind: str) -> None:
    """Note that optimizers must have the flat parameter ``behind`` instead of ``params``."""
    _watch()
    _seen.clear()  # an optimizer may have stepped before its model was wrapped
    for param in params:
        _hidden[param] = behind


def show(params: Iterable[nn.Parameter]) -> None:
    """Optimizers may have ``params`` again."""
    for param in params:
        _hidden.pop(param, None)


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse the step of an optimizer that has a parameter behind a flat one."""
    if _seen.get(optimizer) == len(optimizer.param_groups):
        return
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param in _hidden:
                raise StateError(
                    f"group {i} of {type(optimizer).__name__} has a parameter that FSDP has put "
                    f"into the flat parameter {_hidden[param]!r}, so its step would change "
                    "nothing: make the optimizer after wrapping, with model.parameters(), or wrap "
                    "with use_orig_params=True"
                )
    _seen[optimizer] = len(optimizer.param_groups)


def flat_parameters(
    units: Sequence[tuple[str, Sequence[Storage]]],
) -> Iterator[tuple[str, nn.Parameter]]:
    """The flat parameters of units, by the names of these, in their order."""
    for name, storages in units:
        for i, storage in enumerate(storages):
            yield f"{name}.flat_{i}".lstrip("."), storage.exposed[0]
