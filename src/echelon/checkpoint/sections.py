"""What is saved beside tensors, as JSON in the manifest: its form, each rank's, and that of all.

::

    {"kind": "module",    "extras": {NAME: VALUE}}            what get_extra_state() returned
    {"kind": "optimizer", "class": "AdamW",
     "groups": [{"options": {NAME: ENTRY}, "params": [PARAM]}],
     "state": {"values": {PARAM: {KEY: ENTRY}}, "by_rank": {PARAM: [{KEY: ENTRY} or null]}},
     "extra": X}                                          of what else state_dict() has; or absent
    {"kind": "object" | "value" | "random", VALUE}

    VALUE is "value": X, or "by_rank": [X of rank 0, X of rank 1, ...]; X as in ``values``
    PARAM is the name of a parameter in the checkpoint: that of its model, a slash, its own
    ENTRY is {"$like": DTYPE}: the tensor OPTIMIZER/PARAM/KEY, of the shape of the parameter;
             {"$whole": DTYPE}: such a tensor of another shape;
             {"$number": [DTYPE, X]}: a tensor without dims;
             {"$numbers": [X, {PATH: [DTYPE, X]}]}: an X with such tensors at its paths; else an X

A tensor of an X has the name of what was saved, a slash and its path. Where the tensors of ranks
differ, the first one's has that name, and that of rank 3 stands under ``own/3/`` and that name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, final

from echelon.checkpoint.checksum import checksum
from echelon.checkpoint.format import Manifest
from echelon.checkpoint.tensors import digest_of
from echelon.errors import CheckpointCorrupt, StateError
from echelon.state.tensor_shard import Replication, TensorShard
from echelon.values.value_types import DTYPES

Json = Any

PER_RANK_PREFIX = "own"  # no item of a checkpoint can have this name
_PER_RANK_RE = re.compile(rf"{PER_RANK_PREFIX}/[0-9]+/(.+)")


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Section:
    """What one rank saves under one name.

    Attributes:
        kind: of what is saved: ``"module"``, ``"optimizer"``, ``"object"``, ``"value"`` …
        facts: what is no tensor.
        tensors: ranges, under names that begin with that of the section.
    """

    kind: str
    facts: Json
    tensors: tuple[TensorShard, ...] = ()

    def digest(self) -> str:
        """A checksum that differs where kind or facts differ."""
        return checksum(json.dumps([self.kind, self.facts], sort_keys=True).encode())

    def per_rank_digests(self, rank: int) -> dict[str, str]:
        """Digests of the tensors whose values may differ between ranks, by name.

        Nothing is compared with a tensor that only this rank has, so its bytes are not read, and
        its digest is ``rank``.
        """
        return {
            shard.name: digest_of(shard.values) if shard.num_copies > 1 else f"rank {rank}"
            for shard in self.tensors
            if shard.replication is Replication.PER_RANK
        }


def per_rank_name(rank: int, name: str) -> str:
    """The name of a rank's own values of a tensor, where they differ from the first rank's."""
    return f"{PER_RANK_PREFIX}/{rank}/{name}"


def parse_per_rank_name(name: str) -> str | None:
    """The ``name`` of which ``per_rank_name`` made this one; None if it made no such name."""
    match = _PER_RANK_RE.fullmatch(name)
    return None if match is None else match[1]


Merge = Callable[[str, Mapping[int, Json]], Json]


def merge_sections(name: str, kind: str, by_rank: Mapping[int, Json]) -> Json:
    """The facts of all ranks as one section of the manifest.

    Raises:
        StateError: the ranks hold states that cannot be merged.
    """
    return {"kind": kind, **_MERGES[kind](name, by_rank)}


def _values(name: str, by_rank: Mapping[int, Json]) -> Json:
    """Merge a value: the manifest has one, or one of each rank if they differ."""
    first = by_rank[min(by_rank)]
    if all(value == first for value in by_rank.values()):
        return {"value": first}
    return {"by_rank": [by_rank[rank] for rank in sorted(by_rank)]}


def _modules(name: str, by_rank: Mapping[int, Json]) -> Json:
    """Merge modules: the extra state of each name, from the ranks that have it."""
    extras: dict[str, dict[int, Json]] = {}
    for rank, facts in by_rank.items():
        for key, value in facts.items():
            extras.setdefault(key, {})[rank] = value
    merged = {}
    for key, values in extras.items():
        # Ranks without the module, as of a stage of another rank, get what the first one has.
        first = values[min(values)]
        merged[key] = _values(key, {rank: values.get(rank, first) for rank in by_rank})
    return {"extras": merged}


def _optimizers(name: str, by_rank: Mapping[int, Json]) -> Json:
    """Merge optimizers: their groups by index, and the states of parameters by name."""
    counts = {rank: len(facts["groups"]) for rank, facts in by_rank.items()}
    if len(set(counts.values())) > 1:
        raise StateError(
            f"the optimizers {name!r} of the ranks have different numbers of groups, "
            f"{counts} by rank: make the same groups on all ranks"
        )
    first = by_rank[min(by_rank)]
    groups = []
    group_of: dict[str, int] = {}
    for i in range(len(first["groups"])):
        names: list[str] = []
        for rank, facts in by_rank.items():
            group = facts["groups"][i]
            if group["options"] != first["groups"][i]["options"]:
                raise StateError(
                    f"group {i} of the optimizers {name!r} has other options on rank {rank} than "
                    f"on rank {min(by_rank)}: {_difference(group, first['groups'][i])}. Give the "
                    "optimizers of all ranks the same options"
                )
            for param in group["params"]:
                if group_of.setdefault(param, i) != i:
                    raise StateError(
                        f"parameter {param!r} is in groups {group_of[param]} and {i} of the "
                        f"optimizers {name!r} of the ranks: put it into the same group everywhere"
                    )
                names.append(param)
        groups.append({**first["groups"][i], "params": list(dict.fromkeys(names))})
    merged = {"class": first["class"], "groups": groups, "state": _states(name, by_rank)}
    for rank, facts in by_rank.items():
        if facts.get("extra") != first.get("extra"):
            raise StateError(
                f"state_dict() of the optimizers {name!r} has other values beside the states on "
                f"rank {rank}, {facts.get('extra')!r:.200}, than on rank {min(by_rank)}, "
                f"{first.get('extra')!r:.200}: only what all ranks have alike can be saved"
            )
    if "extra" in first:
        merged["extra"] = first["extra"]
    return merged


def _states(name: str, by_rank: Mapping[int, Json]) -> Json:
    """The states of parameters without their tensors; by rank where these may differ and do."""
    first: dict[str, Json] = {}
    stepped = {param for facts in by_rank.values() for param in facts["state"]}
    for rank, facts in by_rank.items():
        here = {param for group in facts["groups"] for param in group["params"]}
        if lacking := sorted((here & stepped) - {*facts["state"], *facts["own"]}):
            raise StateError(
                f"the optimizers {name!r} of the ranks do not keep the same states: rank {rank} "
                f"has none of {lacking[0]!r}, which it has in its groups, and another rank has "
                "one. An optimizer that deals out its states among ranks cannot be saved here: "
                "gather them into optimizer.state on all ranks, or save each rank's own in a file"
            )
        for param, state in facts["state"].items():
            known = first.setdefault(param, state)
            if known != state and param not in facts["own"]:
                raise StateError(
                    f"the optimizers {name!r} of the ranks hold different states of {param!r}: "
                    f"{state} on rank {rank}, before it {known}. Step the same optimizer on all "
                    "ranks"
                )
    differing = {
        param: [facts["state"].get(param) for _, facts in sorted(by_rank.items())]
        for param, known in first.items()
        if any(facts["state"].get(param, known) != known for facts in by_rank.values())
    }
    return {"values": first, "by_rank": differing}


def _difference(group: Json, expected: Json) -> str:
    """The first option in which two groups differ."""
    options, others = group["options"], expected["options"]
    for key in sorted({*options, *others}):
        if options.get(key) != others.get(key):
            return f"{key} is {options.get(key)} and not {others.get(key)}"
    return "their order differs"


_MERGES: Mapping[str, Merge] = {
    "module": _modules,
    "optimizer": _optimizers,
    "value": _values,
    "object": _values,
    "random": _values,
}


def check_sections(manifest: Manifest, path: str) -> None:
    """Refuse a manifest whose sections do not have the form that this module specifies.

    Raises:
        CheckpointCorrupt: names the section and what is wrong.
    """
    size = manifest.world.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size != len(manifest.threads):
        raise CheckpointCorrupt(f"the size of its world is {size!r:.80}", path)
    for name, section in manifest.sections.items():
        _SectionChecker(path, name, size).check(section)


class _SectionChecker:
    """Checks the form of one section."""

    def __init__(self, path: str, name: str, size: int) -> None:
        self._path, self._name, self._size = path, name, size

    def check(self, section: Any) -> None:
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

    def _value(self, value: Any) -> None:
        self._dict(value)
        if "by_rank" in value:
            self._by_rank(value["by_rank"])
        elif "value" not in value:
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
            everyone += [entries for entries in self._by_rank(by_rank) if entries is not None]
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
            self._dtype(self._pair(entry["$number"])[0])
        if "$numbers" in entry:
            for number in self._dict(self._pair(entry["$numbers"])[1]).values():
                self._dtype(self._pair(number)[0])

    def _pair(self, value: Any) -> list[Any]:
        pair = self._list(value)
        return pair if len(pair) == 2 else self._refuse("has a number that is none")

    def _dtype(self, value: Any) -> None:
        if not isinstance(value, str) or value not in DTYPES:
            self._refuse(f"has a state of dtype {value!r:.80}")

    def _by_rank(self, value: Any) -> list[Any]:
        if len(self._list(value)) != self._size:
            self._refuse(f"has values of {len(value)} ranks instead of {self._size}")
        return list(value)

    def _dict(self, value: Any) -> dict[str, Any]:
        return (
            value if isinstance(value, dict) else self._refuse(f"has {value!r:.40} for an object")
        )

    def _list(self, value: Any) -> list[Any]:
        return value if isinstance(value, list) else self._refuse(f"has {value!r:.40} for a list")

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointCorrupt(f"section {self._name!r:.80} {what}", self._path)
