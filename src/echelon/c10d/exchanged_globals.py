"""Global variables of modules, and attributes of their classes, that each rank has for itself.

Ranks take turns, so such values are exchanged at each turn, and the caller's are put back when the
ranks end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

_MISSING = object()

Values = dict[tuple[str, str], Any]


class Place(NamedTuple):
    """A global that each rank has for itself.

    Attributes:
        module: where it is; nothing happens before somebody imports it.
        names: attributes, with dots from the module on.
        first: makes what a rank finds at first; it gets what is there now.
        reason: why ranks cannot share it.
    """

    module: str
    names: tuple[str, ...]
    first: Callable[[Any], Any]
    reason: str


class _Global(NamedTuple):
    """One attribute of a place, cut at its dots."""

    key: tuple[str, str]
    holders: tuple[str, ...]
    attribute: str
    first: Callable[[Any], Any]


@final
class ExchangedGlobals:
    """The globals of some places, to be read and put back.

    Law: what a rank finds in a place was put there by itself, or was there at first.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._by_module: dict[str, list[_Global]] = {}
        for place in places:
            for name in place.names:
                *holders, attribute = name.split(".")
                self._by_module.setdefault(place.module, []).append(
                    _Global((place.module, name), tuple(holders), attribute, place.first)
                )

    def save(self) -> Values:
        """What is in the places of modules that somebody has imported."""
        return {each.key: value for each, _, value in self._loaded()}

    def restore(self, values: Values) -> None:
        """Put values into their places; where there is none, what is there at first."""
        for each, holder, current in self._loaded():
            key, _, attribute, first = each
            if key not in values:
                values[key] = first(current)
            if values[key] is not current:  # an assignment to a class costs more than it seems
                setattr(holder, attribute, values[key])

    def _loaded(self) -> Iterator[tuple[_Global, Any, Any]]:
        modules = sys.modules
        for name, members in self._by_module.items():
            module: Any = modules.get(name)
            if module is None:
                continue
            for each in members:
                holder = module
                for part in each.holders:
                    holder = getattr(holder, part, None)
                value = getattr(holder, each.attribute, _MISSING)
                if value is not _MISSING:  # as while the module is being imported
                    yield each, holder, value
