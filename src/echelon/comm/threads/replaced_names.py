"""Attributes of modules and classes that each simulated rank has for itself.

Libraries replace some for a while, such as functions of ``torch.nn.init``; others mean something
else to ranks. They are read at each turn, and written only where the next rank has other values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from types import FunctionType
from typing import Any, final

import torch

from echelon.comm.threads.process_state import register_state

_Values = tuple[Any, ...]


@final
class Names:
    """Attributes that are read and written together.

    Args:
        places: the holder and the name of each.

    Example:
        >>> class Holder:
        ...     number = 1
        >>> names = Names([(Holder, "number")])
        >>> before = names.read()
        >>> Holder.number = 2
        >>> names.write(before)
        >>> Holder.number, names.read() is before
        (1, True)
    """

    def __init__(self, places: Iterable[tuple[Any, str]]) -> None:
        self._places = [(holder, vars(holder), name) for holder, name in places]
        self._latest: _Values = ()

    def read(self) -> _Values:
        """The values: the same tuple as before if they are what was read or written last."""
        values = tuple([attributes[name] for _, attributes, name in self._places])
        if not self._latest or not all(map(is_, values, self._latest)):
            self._latest = values
        return self._latest

    def write(self, values: _Values) -> None:
        """Assign the values that differ from what is there."""
        for (holder, attributes, name), value in zip(self._places, values, strict=True):
            if attributes[name] is value:
                continue
            if isinstance(attributes, dict):
                attributes[name] = value
            else:
                setattr(holder, name, value)
        self._latest = values


def register_replacements(
    name: str,
    replacements: Sequence[tuple[Any, str, Any]],
    first: Callable[[Any, Any], Any] = lambda current, replacement: replacement,
) -> None:
    """Let each simulated rank find other attributes, which it may assign for itself.

    Args:
        name: of this state of the process.
        replacements: of each attribute its holder, its name, and what ranks find.
        first: makes what ranks find, from what is there and the third of a replacement.
    """
    names = Names((holder, attribute) for holder, attribute, _ in replacements)
    made: list[tuple[_Values, _Values]] = []  # for the caller's values, so that ranks have the same

    def of_rank(current: _Values) -> _Values:
        if not made or made[0][0] is not current:
            values = zip(current, (new for _, _, new in replacements), strict=True)
            made[:] = [(current, tuple(first(old, new) for old, new in values))]
        return made[0][1]

    register_state(name, names.read, names.write, of_rank)


def _initializers() -> list[tuple[Any, str]]:
    """Where functions of ``torch.nn.init`` stand: modules of layers import some by name."""
    names = {name for name, value in vars(torch.nn.init).items() if type(value) is FunctionType}
    modules = [name for name in sys.modules if name.startswith("torch.nn.modules.")]
    return [
        (module, name)
        for module in map(sys.modules.__getitem__, ["torch.nn.init", *modules])
        for name in names & vars(module).keys()
    ]


# Libraries replace these while they build a model, which may wait for other ranks.
_functions = Names(_initializers())
register_state("torch.nn.init", _functions.read, _functions.write)
