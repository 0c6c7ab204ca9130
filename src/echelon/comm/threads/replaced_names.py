"""Attributes of modules and classes that each simulated rank has for itself.

Libraries replace some for a while, such as functions of ``torch.nn.init``; others mean something
else to ranks. They are read at each turn, and written only where the next rank has other values.

[Note: the end of an import]
A rank may import a module, replace an attribute of it, and hand on before any other rank has seen
the module. What the others find then is what was there when the import ended, so it is read then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import accumulate, chain, compress, groupby
from operator import call, is_not, itemgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, final

import torch

from echelon.comm.threads.process_state import register_state
from echelon.process.replacement import Installation

Values = tuple[Any, ...]

# An attribute: its holder, the values of that by their names, its name, ``first`` of its place, and
# what was there at first. A plain tuple, because those of a class take far longer to unpack.
_Attribute = tuple[Any, Any, str, Callable[[Any], Any], Any]

_MISSING = object()  # stands for a value that a rank does not have, or for one that is not there


def _same(value: Any) -> Any:
    return value


def empty(value: Any) -> Any:
    """A new container of the same kind, with which a rank begins."""
    return type(value)()


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


def _imported(name: str, complete: ModuleType | None) -> Any:
    """A module, once its import has ended: before, it may lack some of its attributes.

    Args:
        complete: a module that has all of its attributes, although its import has not ended.
    """
    module = sys.modules.get(name)
    if module is None or (
        module is not complete and getattr(module.__spec__, "_initializing", False)
    ):
        return None
    return module


def _attributes(
    places: Iterable[Place], complete: ModuleType | None, before: Sequence[_Attribute]
) -> Iterator[_Attribute]:
    """Where the attributes are now; ``before`` is where they were."""
    by_holder: dict[int, Any] = {}  # ``vars`` of a class is another object each time
    absent: dict[str, Any] = {}
    known = iter(before)
    for place in places:
        root = _imported(place.holder, complete) if isinstance(place.holder, str) else place.holder
        for path in place.names:
            *holders, name = path.split(".")
            holder = root
            for each in holders:
                holder = getattr(holder, each, None)
            values = {} if holder is None else by_holder.setdefault(id(holder), vars(holder))
            if name not in values:
                absent[name] = _MISSING
                values = absent
            of_holder, *_, at_first = next(known, (None, _MISSING))
            if of_holder is not holder or at_first is _MISSING:
                at_first = values[name]
                if isinstance(at_first, dict):  # which ranks change in place
                    at_first = copy(at_first)
            yield holder, values, name, place.first, at_first


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
        >>> names.read()
        (2,)
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
        self._attributes: list[_Attribute] = []
        self._look()
        for name in self._awaited:
            _awaiting.setdefault(name, []).append(self._look)

    def _look(self, complete: ModuleType | None = None) -> None:
        """Look where the attributes are now; ``complete`` is a module whose import ends."""
        modules = [_imported(name, complete) for name in self._awaited]
        attributes = list(_attributes(self._places, complete, self._attributes))
        runs = [list(run) for _, run in groupby(attributes, lambda each: id(each[1]))]
        self._modules, self._attributes = modules, attributes
        # All names of a holder are read in one call of C. It gives tuples of two names or more, so
        # a name that is the only one of its holder is read twice.
        names = [[name for _, _, name, *_ in run] for run in runs]
        self._gets = [itemgetter(*of_run, *of_run[: len(of_run) == 1]) for of_run in names]
        self._namespaces = [run[0][1] for run in runs]
        starts = accumulate((max(len(of_run), 2) for of_run in names), initial=0)
        self._indices = [
            start + i
            for start, of_run in zip(starts, names, strict=False)
            for i in range(len(of_run))
        ]

    def read(self) -> Values:
        """The values; if none is made for a rank, the same tuple as long as nothing has changed."""
        if self._awaited and list(map(sys.modules.get, self._awaited)) != self._modules:
            self._look()
        seen = list(map(call, self._gets, self._namespaces))
        if seen != self._seen or not self._are_compared:
            flat = list(chain.from_iterable(seen))
            self._seen, self._latest = seen, tuple(map(flat.__getitem__, self._indices))
        return self._latest

    def write(self, values: Values) -> None:
        """Assign the values that differ from those that ``read`` has just returned."""
        pairs = zip(self._attributes, values, strict=True)
        differs = map(is_not, self._latest, values)  # most do not, and C is faster than a loop
        for (holder, attributes, name, first, at_first), value in compress(pairs, differs):
            if attributes[name] is _MISSING:
                continue
            if value is _MISSING:  # the module was imported since these values were read
                value = first(at_first)
            if isinstance(attributes, dict):
                attributes[name] = value
            else:
                setattr(holder, name, value)
        changed, self._latest = values is not self._latest, values
        if self._are_compared and changed:
            self._seen = list(map(call, self._gets, self._namespaces))

    def first_values(self, values: Values) -> Values:
        """What a rank finds at first whose caller has these values."""
        return tuple(
            value if value is _MISSING else first(value)
            for (_, _, _, first, _), value in zip(self._attributes, values, strict=True)
        )


_awaiting: dict[str, list[Callable[[ModuleType], None]]] = {}  # who looks, by names of modules


@final
class _ImportEnds(MetaPathFinder):
    """Has an awaited module looked at when its import ends; see [Note: the end of an import]."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec of an awaited module; of others, none."""
        if name not in _awaiting:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_look(module: ModuleType) -> None:
            execute(module)
            for look in _awaiting[name]:
                look(module)

        spec.loader.exec_module = execute_and_look  # type: ignore[method-assign]
        return spec


_import_ends = _ImportEnds()


def _watch() -> None:
    if _import_ends not in sys.meta_path:  # behind finders that want to see what others find
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
        sys.meta_path.insert(place, _import_ends)


# Each rank needs it.
watching_imports = Installation(_watch, lambda: sys.meta_path.remove(_import_ends))


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
    yield Place(torch, ("linspace",))  # which transformers replaces


# Libraries replace these while they build a model, which may wait for other ranks.
_functions = Names(_initializers())
register_state("torch.nn.init", _functions.read, _functions.write)
