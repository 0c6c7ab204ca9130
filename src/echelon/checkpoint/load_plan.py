"""Where the tensors of a step belong on this rank, and what of them does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from echelon.checkpoint.format import Manifest
from echelon.checkpoint.records import SavedTensor
from echelon.checkpoint.sections import Json, per_rank_name
from echelon.errors import CheckpointCorrupt
from echelon.state.tensor_shard import Replication, TensorShard
from echelon.values.decoding import decode
from echelon.values.value_types import DTYPES, nbytes_of

_OWN = re.compile(r"own/[0-9]+/(.+)")  # as per_rank_name gives it
_MOST_TIMES = 16  # that a tensor is loaded: several that are tied may be apart here


class ReadItem(NamedTuple):
    """Memory that a range of a saved tensor goes into.

    Attributes:
        saved: the tensor.
        start: of the range.
        values: the memory.
    """

    saved: SavedTensor
    start: int
    values: Tensor


@final
@dataclass(kw_only=True, eq=False)
class LoadPlan:
    """What a step gives to one rank, found before a byte of it moves.

    Attributes:
        manifest: of the step.
        path: of the step, for messages.
        rank: of this one.
        size: how many load.
        live: memory that the user sees already; it is written when all is known to be good.
        fresh: memory that nobody sees yet.
        used: names of the step that have a place here.
        missing: what the step does not have.
        differing: what has another shape or dtype, by name.
        apart: what ranks had values of their own of, which cannot be given back.
    """

    manifest: Manifest
    path: str
    rank: int
    size: int
    live: list[ReadItem] = field(default_factory=list)
    fresh: list[ReadItem] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    differing: dict[str, str] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_name = {
            name: saved
            for saved in self.manifest.tensors.values()
            for name in (saved.name, *saved.ties)
        }
        found = map(_OWN.fullmatch, self.manifest.tensors)
        self._apart = {match[1] for match in found if match is not None}
        tensors = self.manifest.tensors.values()
        self._most = _MOST_TIMES * sum(nbytes_of(one.dtype, one.shape) for one in tensors)
        self._claimed = 0
        self._values: dict[str, Tensor] = {}

    @property
    def same_size(self) -> bool:
        """Whether as many ranks load as have saved."""
        return self.saved_size == self.size

    @property
    def saved_size(self) -> int:
        """How many ranks have saved."""
        return cast(int, self.manifest.world["size"])

    def find(self, names: Sequence[str]) -> SavedTensor | None:
        """The tensor that has one of these names."""
        return next((self._by_name[name] for name in names if name in self._by_name), None)

    def fits(self, names: Sequence[str], shape: tuple[int, ...]) -> bool:
        """Whether the step has a tensor of one of these names that has this shape."""
        saved = self.find(names)
        return saved is not None and saved.shape == shape

    def claim(self, nbytes: int) -> None:
        """Say that memory is taken for what the step has.

        Raises:
            CheckpointCorrupt: it is far more than the step itself takes, which somebody has made
                so.
        """
        self._claimed += nbytes
        if self._claimed > self._most:
            raise CheckpointCorrupt(
                f"asks for more than {self._most} bytes of memory, {_MOST_TIMES} times of what its "
                "tensors have",
                self.path,
            )

    def place(self, shard: TensorShard, *, fresh: bool = False) -> bool:
        """Have a range of this rank read, if the step has it and it fits; whether it will be."""
        saved = self.find(shard.names)
        if saved is None:
            self.missing.append(shard.name)
            return False
        self.used.add(saved.name)
        per_rank = shard.replication is Replication.PER_RANK
        chosen = self._own(saved, self.same_size) if per_rank else saved
        problem = _misfit(chosen, shard)
        if problem is not None:
            self.differing[shard.name] = problem
        if chosen.shape != shard.shape or not _converts(chosen, shard):
            return False
        (self.fresh if fresh else self.live).append(ReadItem(chosen, shard.start, shard.values))
        return True

    def _own(self, saved: SavedTensor, has_own: bool) -> SavedTensor:
        """This rank's own values, where ranks had different ones."""
        if saved.name not in self._apart:
            return saved
        if not self.same_size:
            self.apart.append(saved.name)
        name = per_rank_name(self.rank, saved.name)
        return self.manifest.tensors.get(name, saved) if has_own else saved

    def value(self, section: Json, name: str, *, by_place: bool = False) -> Any:
        """A value as it was saved; its tensors have memory that is read later.

        Args:
            by_place: whether ranks that were there get their own on any number of ranks.
        """
        has_own = self.same_size or (by_place and self.rank < self.saved_size)
        facts = section.get("value")
        if "by_rank" in section:
            facts = section["by_rank"][self.rank if has_own else 0]
            if not self.same_size:
                self.apart.append(name)
        return decode(facts, _Fresh(self, name, has_own), f"{self.path}: {name}")

    def members_apart(self, section: Json, name: str) -> set[str]:
        """The members of a value, a dict, of which ranks had their own."""
        facts = [one for one in section.get("by_rank", ()) if isinstance(one, dict)]
        found = {key for one in facts for key in one if one[key] != facts[0].get(key)}
        tensors = (path.split("/") for path in self._apart)
        return found | {path[1] for path in tensors if path[0] == name and len(path) > 1}

    def fresh_value(self, name: str, has_own: bool) -> Tensor:
        """The memory of a tensor of a value, which is read later; once for each tensor.

        Args:
            has_own: whether this rank gets its own, where ranks had different ones.

        Raises:
            KeyError: the step has no such tensor.
        """
        found = self.find([name])
        if found is None:
            raise KeyError(name)
        self.used.add(found.name)
        if found.name not in self._values:
            chosen = self._own(found, has_own)
            self.claim(nbytes_of(chosen.dtype, chosen.shape))
            values = torch.empty(chosen.shape, dtype=DTYPES[chosen.dtype], device="cpu")
            self.fresh.append(ReadItem(chosen, 0, values))
            self._values[found.name] = values
        return self._values[found.name]


class _Fresh(Mapping[str, Tensor]):
    """The tensors of a value, each made when it is asked for."""

    def __init__(self, plan: LoadPlan, name: str, has_own: bool) -> None:
        self._plan, self._name, self._has_own = plan, name, has_own

    def __getitem__(self, path: str) -> Tensor:
        return self._plan.fresh_value(f"{self._name}/{path}", self._has_own)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _misfit(saved: SavedTensor, shard: TensorShard) -> str | None:
    """How a saved tensor differs from what is here; None if it does not."""
    if saved.shape != shard.shape:
        return f"saved as {list(saved.shape)}, here {list(shard.shape)}"
    dtype = DTYPES[saved.dtype]
    if dtype != shard.values.dtype:
        return f"saved as {dtype}, here {shard.values.dtype}"
    return None


def _converts(saved: SavedTensor, shard: TensorShard) -> bool:
    return torch.can_cast(DTYPES[saved.dtype], shard.values.dtype)
