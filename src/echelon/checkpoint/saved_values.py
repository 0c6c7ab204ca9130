"""What is saved beside tensors, as JSON in the manifest: its form, and whether it has that form.

::

    {"kind": "module",    "extras": {NAME: VALUE}}            what get_extra_state() returned
    {"kind": "optimizer", "class": "AdamW",
     "groups": [{"options": {NAME: ENTRY}, "params": [PARAM]}],
     "state": {"values": {PARAM: {KEY: ENTRY}}, "by_rank": {PARAM: [{KEY: ENTRY} or null]}}}
    {"kind": "object" | "value" | "random", VALUE}

    VALUE is "value": X, or "by_rank": [X of rank 0, X of rank 1, ...]; X as in ``values``
    PARAM is the name of a parameter in the checkpoint: that of its model, a slash, its own
    ENTRY is {"$like": DTYPE}: the tensor OPTIMIZER/PARAM/KEY, of the shape of the parameter;
             {"$whole": DTYPE}: such a tensor of a shape of its own;
             {"$number": [DTYPE, X]}: a tensor without dims; else an X

A tensor of an X has the name of what was saved, a slash and its path. Where the tensors of ranks
differ, the first one's has that name, and that of rank 3 stands under ``own/3/`` and that name.
"""

from __future__ import annotations

from typing import Any, NoReturn

from echelon.checkpoint.format import Manifest
from echelon.errors import CheckpointCorrupt
from echelon.values.value_types import DTYPES


def check_facts(manifest: Manifest, path: str) -> None:
    """Refuse a manifest whose sections have another form.

    Raises:
        CheckpointCorrupt: names the section and what is wrong.
    """
    size = manifest.world.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size != len(manifest.threads):
        raise CheckpointCorrupt(f"the size of its world is {size!r:.80}", path)
    for name, section in manifest.sections.items():
        _Form(path, name, size).check(section)


class _Form:
    """The form of one section."""

    def __init__(self, path: str, name: str, size: int) -> None:
        self._path, self._name, self._size = path, name, size

    def check(self, section: Any) -> None:
        """Refuse another form."""
        self._dict(section)
        kind = section.get("kind")
        if kind == "module":
            for extra in self._dict(section.get("extras")).values():
                self._value(extra)
        elif kind == "optimizer":
            self._optimizer(section)
        elif kind in ("object", "value", "random"):
            self._value(section)
        else:
            self._refuse(f"is of kind {kind!r:.80}")

    def _value(self, found: Any) -> None:
        self._dict(found)
        if "by_rank" in found:
            self._by_rank(found["by_rank"])
        elif "value" not in found:
            self._refuse("has no value")

    def _optimizer(self, section: Any) -> None:
        for group in self._list(section.get("groups")):
            for entry in self._dict(self._dict(group).get("options")).values():
                self._entry(entry)
            if not all(isinstance(param, str) for param in self._list(group.get("params"))):
                self._refuse("has a parameter without a name")
        state = self._dict(section.get("state"))
        everyone = list(self._dict(state.get("values")).values())
        for by_rank in self._dict(state.get("by_rank")).values():
            everyone += [one for one in self._by_rank(by_rank) if one is not None]
        for entries in everyone:
            for entry in self._dict(entries).values():
                self._entry(entry)

    def _entry(self, entry: Any) -> None:
        if not isinstance(entry, dict):
            return
        for key in ("$like", "$whole"):
            if key in entry:
                self._dtype(entry[key])
        if "$number" in entry:
            number = self._list(entry["$number"])
            if len(number) != 2:
                self._refuse("has a number that is none")
            self._dtype(number[0])

    def _dtype(self, found: Any) -> None:
        if not isinstance(found, str) or found not in DTYPES:
            self._refuse(f"has a state of dtype {found!r:.80}")

    def _by_rank(self, found: Any) -> list[Any]:
        if len(self._list(found)) != self._size:
            self._refuse(f"has values of {len(found)} ranks instead of {self._size}")
        return list(found)

    def _dict(self, found: Any) -> dict[str, Any]:
        return (
            found if isinstance(found, dict) else self._refuse(f"has {found!r:.40} for an object")
        )

    def _list(self, found: Any) -> list[Any]:
        return found if isinstance(found, list) else self._refuse(f"has {found!r:.40} for a list")

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointCorrupt(f"section {self._name!r:.80} {what}", self._path)
