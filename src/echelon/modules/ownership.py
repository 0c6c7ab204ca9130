"""Which wrapper a parameter belongs to: a second one would reduce its gradient again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from echelon.errors import ArgumentError

# By parameter: the name of the wrapper, and whether it is still there. No parameter is kept by it.
_claims: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(params: Iterable[nn.Parameter], owner: nn.Module, *, for_good: bool) -> None:
    """Note that ``params`` belong to ``owner``.

    Args:
        for_good: also when ``owner`` is dropped, because they are not what they were.
    """
    found = weakref.ref(owner)
    is_there: Callable[[], bool] = (lambda: True) if for_good else (lambda: found() is not None)
    for param in params:
        _claims[param] = type(owner).__name__, is_there


def disclaim(params: Iterable[nn.Parameter]) -> None:
    """``params`` belong to nobody."""
    for param in params:
        _claims.pop(param, None)


def is_claimed(param: nn.Parameter) -> bool:
    """Whether ``param`` belongs to a wrapper, which reduces its gradient."""
    _, is_there = _claims.get(param, ("", lambda: False))
    return bool(is_there())


def check_unclaimed(module: nn.Module) -> None:
    """Refuse a module of which a wrapper has a parameter already.

    Raises:
        ArgumentError: names the parameter and the wrapper.
    """
    for name, param in module.named_parameters():
        owner, is_there = _claims.get(param, ("", lambda: False))
        if is_there():
            raise ArgumentError(
                f"parameter {name!r} belongs to {owner} already: wrap the plain module once (a DDP "
                "is taken off by unwrap(); what FSDP gathers together is said with units=...)"
            )
