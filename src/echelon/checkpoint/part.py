"""What one rank brings to a checkpoint under one name: facts as JSON, and ranges of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from echelon.checkpoint.checksum import Checksum
from echelon.checkpoint.tensors import digest_of
from echelon.errors import StateError
from echelon.state.tensor_shard import Replication, TensorShard

Json = Any


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """What one rank saves under one name.

    Attributes:
        kind: of what is saved: ``"module"``, ``"optimizer"``, ``"object"``, ``"value"`` …
        facts: what is no tensor.
        tensors: ranges, under names that begin with that of the part.
    """

    kind: str
    facts: Json
    tensors: tuple[TensorShard, ...] = ()

    def digest(self) -> str:
        """Differs where kind or facts differ."""
        checksum = Checksum()
        checksum.update(json.dumps([self.kind, self.facts], sort_keys=True).encode())
        return checksum.hexdigest()

    def own_digests(self, rank: int) -> dict[str, str]:
        """Of the tensors that nobody keeps alike, by name.

        What only this rank has is compared with nothing, so its bytes are not read for it.

        Args:
            rank: of this one, which stands for what only it has.
        """
        return {
            one.name: digest_of(one.values) if one.num_copies > 1 else f"rank {rank}"
            for one in self.tensors
            if one.replication is Replication.PER_RANK
        }


def own_name(rank: int, name: str) -> str:
    """The name of a rank's own values, where they differ from the first rank's."""
    return f"own/{rank}/{name}"


Merge = Callable[[str, Mapping[int, Json]], Json]


def together(name: str, kind: str, by_rank: Mapping[int, Json]) -> Json:
    """The facts of all ranks as one, for the manifest.

    Raises:
        StateError: the ranks hold states that cannot be one.
    """
    return {"kind": kind, **_MERGES[kind](name, by_rank)}


def _values(name: str, by_rank: Mapping[int, Json]) -> Json:
    """Of a value: one, or one a rank."""
    first = by_rank[min(by_rank)]
    if all(one == first for one in by_rank.values()):
        return {"value": first}
    return {"by_rank": [by_rank[rank] for rank in sorted(by_rank)]}


def _modules(name: str, by_rank: Mapping[int, Json]) -> Json:
    """Of modules: further state by its name, from the ranks that have it."""
    found: dict[str, dict[int, Json]] = {}
    for rank, extras in by_rank.items():
        for key, value in extras.items():
            found.setdefault(key, {})[rank] = value
    return {"extras": {key: _values(key, {**_all(own, by_rank)}) for key, own in found.items()}}


def _all(own: Mapping[int, Json], by_rank: Mapping[int, Json]) -> dict[int, Json]:
    """Where a rank has none, as of a stage of another, the first one's stands for it."""
    first = own[min(own)]
    return {rank: own.get(rank, first) for rank in by_rank}


def _optimizers(name: str, by_rank: Mapping[int, Json]) -> Json:
    """Of optimizers: their groups by place, and the states of parameters by name."""
    counts = {rank: len(facts["groups"]) for rank, facts in by_rank.items()}
    if len(set(counts.values())) > 1:
        raise StateError(
            f"the optimizers {name!r} of the ranks have different numbers of groups, "
            f"{counts} by rank: make the same groups on all ranks"
        )
    first = by_rank[min(by_rank)]
    groups = []
    place: dict[str, int] = {}
    for i in range(len(first["groups"])):
        names: list[str] = []
        for rank, facts in by_rank.items():
            own = facts["groups"][i]
            if own["options"] != first["groups"][i]["options"]:
                raise StateError(
                    f"group {i} of the optimizers {name!r} has other options on rank {rank} than "
                    f"on rank {min(by_rank)}: {_difference(own, first['groups'][i])}. Give the "
                    "optimizers of all ranks the same options"
                )
            for param in own["params"]:
                if place.setdefault(param, i) != i:
                    raise StateError(
                        f"parameter {param!r} is in groups {place[param]} and {i} of the "
                        f"optimizers {name!r} of the ranks: put it into the same group everywhere"
                    )
                names.append(param)
        groups.append({**first["groups"][i], "params": list(dict.fromkeys(names))})
    return {"class": first["class"], "groups": groups, "state": _states(name, by_rank)}


def _states(name: str, by_rank: Mapping[int, Json]) -> Json:
    """What is no tensor of the states, by parameter; where ranks may differ, by rank."""
    state: dict[str, Json] = {}
    for rank, facts in by_rank.items():
        for param, own in facts["state"].items():
            known = state.setdefault(param, own)
            if known == own:
                continue
            if param not in facts["own"]:
                raise StateError(
                    f"the optimizers {name!r} of the ranks hold different states of {param!r}: "
                    f"{own} on rank {rank}, before it {known}. Step the same optimizer on all ranks"
                )
    apart = {
        param: [facts["state"].get(param) for _, facts in sorted(by_rank.items())]
        for param, known in state.items()
        if any(facts["state"].get(param, known) != known for facts in by_rank.values())
    }
    return {"values": state, "by_rank": apart}


def _difference(one: Json, other: Json) -> str:
    """The first option that differs."""
    mine, theirs = one["options"], other["options"]
    for key in sorted({*mine, *theirs}):
        if mine.get(key) != theirs.get(key):
            return f"{key} is {mine.get(key)} and not {theirs.get(key)}"
    return "their order differs"


_MERGES: Mapping[str, Merge] = {
    "module": _modules,
    "optimizer": _optimizers,
    "value": _values,
    "object": _values,
    "random": _values,
}
