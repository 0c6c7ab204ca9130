"""Attributes of modules and classes that each simulated rank has for itself.

Libraries replace some for a while, such as functions of ``torch.nn.init``; others mean something
else to ranks. They are read at each turn, and written only where the next rank has other values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple, final

import torch

from echelon.comm.threads.process_state import register_state

Values = tuple[Any, ...]

# An attribute: its holder, the values of that by their names, its name, and ``first`` of its place.
# A plain tuple, because those of a class of its own take far longer to unpack.
_Attribute = tuple[Any, Any, str, Callable[[Any], Any]]

_MISSING = object()  # stands for a value that a rank does not have, or for one that is not there


def _same(value: Any) -> Any:
    return value


class Place(NamedTuple):
    """Attributes that each rank has for itself.

    Attributes:
        holder: a module or a class, or the name of a module that somebody may import later.
        names: of the attributes, with dots from the holder on.
        first: makes what a rank finds at first, from what is there.
        reason: why ranks cannot share it.
    """

    holder: Any
    names: tuple[str, ...]
    first: Callable[[Any], Any] = _same
    reason: str = ""


def _imported(name: str) -> Any:
    """A module, once its import has ended: before, it may lack some of its attributes."""
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    return module


def _attributes(places: Iterable[Place]) -> Iterator[_Attribute]:
    by_holder: dict[int, Any] = {}  # ``vars`` of a class is another object each time
    absent: dict[str, Any] = {}
    for place in places:
        root = _imported(place.holder) if isinstance(place.holder, str) else place.holder
        for path in place.names:
            *holders, name = path.split(".")
            holder = root
            for each in holders:
                holder = getattr(holder, each, None)
            values = {} if holder is None else by_holder.setdefault(id(holder), vars(holder))
            if name not in values:
                absent[name] = _MISSING
                values = absent
            yield holder, values, name, place.first


def _getter(names: Sequence[str]) -> Callable[[Any], Iterable[Any]]:
    """What gets the values of some names; all in one call takes half the time."""
    if len(names) == 1:
        return lambda values: (values[names[0]],)
    return itemgetter(*names)


@final
class Names:
    """The attributes of some places, which are read and written together.

    Law: what a rank finds in a place was put there by itself, or was there at first.

    Example:
        >>> class Holder:
        ...     number = 1
        >>> names = Names([Place(Holder, ("number",))])
        >>> before = names.read()
        >>> Holder.number = 2
        >>> names.write(before)
        >>> Holder.number, names.read() is before
        (1, True)
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = list(places)
        names = (each.holder for each in self._places if isinstance(each.holder, str))
        self._awaited = list(dict.fromkeys(names))  # modules
        # Dictionaries that ranks have for themselves may be equal, and are not the same.
        self._are_compared = all(each.first is _same for each in self._places)
        self._seen: list[Any] = []  # what was read or written last, by holder
        self._latest: Values = ()
        self._look()

    def _look(self) -> None:
        """Look where the attributes are now."""
        self._modules = list(map(_imported, self._awaited))
        self._attributes = list(_attributes(self._places))
        neighbours = groupby(self._attributes, lambda each: id(each[1]))
        runs = (list(each) for _, each in neighbours)
        self._gets = [(_getter([name for _, _, name, _ in run]), run[0][1]) for run in runs]

    def read(self) -> Values:
        """The values; if none is made for a rank, the same tuple as long as nothing has changed."""
        if self._awaited and list(map(sys.modules.get, self._awaited)) != self._modules:
            self._look()
        seen = [get(values) for get, values in self._gets]
        if seen != self._seen or not self._are_compared:
            self._seen, self._latest = seen, tuple(chain.from_iterable(seen))
        return self._latest

    def write(self, values: Values) -> None:
        """Assign the values that differ from what was there when they were last read."""
        for (holder, attributes, name, first), value in zip(self._attributes, values, strict=True):
            current = attributes[name]
            if current is value or current is _MISSING:
                continue
            if value is _MISSING:  # the module was imported since these values were read
                value = first(current)
            if isinstance(attributes, dict):
                attributes[name] = value
            else:
                setattr(holder, name, value)
        self._latest = values
        if self._are_compared:
            self._seen = [get(values) for get, values in self._gets]

    def first_values(self, values: Values) -> Values:
        """What a rank finds at first whose caller has these values."""
        return tuple(
            value if value is _MISSING else first(value)
            for (_, _, _, first), value in zip(self._attributes, values, strict=True)
        )


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
    names = Names(Place(holder, (attribute,)) for holder, attribute, _ in replacements)
    made: list[tuple[Values, Values]] = []  # for the caller's values, so that ranks have the same

    def of_rank(current: Values) -> Values:
        if not made or made[0][0] is not current:
            values = zip(current, (new for _, _, new in replacements), strict=True)
            made[:] = [(current, tuple(first(old, new) for old, new in values))]
        return made[0][1]

    register_state(name, names.read, names.write, of_rank)


def _initializers() -> Iterator[Place]:
    """Where functions of ``torch.nn.init`` stand: modules of layers import some by name."""
    names = {name for name, value in vars(torch.nn.init).items() if type(value) is FunctionType}
    modules = [name for name in sys.modules if name.startswith("torch.nn.modules.")]
    for module in map(sys.modules.__getitem__, ["torch.nn.init", *modules]):
        yield Place(module, tuple(names & vars(module).keys()))


# Libraries replace these while they build a model, which may wait for other ranks.
_functions = Names(_initializers())
register_state("torch.nn.init", _functions.read, _functions.write)
