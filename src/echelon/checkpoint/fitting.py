"""Where the tensors of a step belong on this rank, and what of them does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.checkpoint.format import DTYPES, Manifest, SavedTensor
from echelon.checkpoint.part import Json, own_name
from echelon.checkpoint.values import decode
from echelon.errors import CheckpointCorrupt
from echelon.held import Held, Kept

__all__ = ["Fitting", "Target"]


class Target(NamedTuple):
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
class Fitting:
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
    live: list[Target] = field(default_factory=list)
    fresh: list[Target] = field(default_factory=list)
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
        self._apart = {
            name.split("/", 2)[2] for name in self.manifest.tensors if name.startswith("own/")
        }

    @property
    def same_size(self) -> bool:
        """Whether as many ranks load as have saved."""
        return self.manifest.world.get("size") == self.size

    def find(self, names: Sequence[str]) -> SavedTensor | None:
        """The tensor that has one of these names."""
        return next((self._by_name[name] for name in names if name in self._by_name), None)

    def place(self, held: Held, *, fresh: bool = False) -> bool:
        """Have a range of this rank read, if the step has it and it fits; whether it will be."""
        saved = self.find(held.names)
        if saved is None:
            self.missing.append(held.name)
            return False
        self.used.add(saved.name)
        chosen = self._own(saved) if held.kept is Kept.OWN else saved
        problem = _misfit(chosen, held)
        if problem is not None:
            self.differing[held.name] = problem
        if chosen.shape != held.shape or not _converts(chosen, held):
            return False
        (self.fresh if fresh else self.live).append(Target(chosen, held.start, held.values))
        return True

    def _own(self, saved: SavedTensor) -> SavedTensor:
        """This rank's own values, where ranks had different ones."""
        if saved.name not in self._apart:
            return saved
        if not self.same_size:
            self.apart.append(saved.name)
            return saved
        return self.manifest.tensors.get(own_name(self.rank, saved.name), saved)

    def value(self, section: Json, name: str) -> Any:
        """A value as it was saved; its tensors have memory that is read later."""
        facts = section.get("value")
        if "by_rank" in section:
            facts = section["by_rank"][self.rank if self.same_size else 0]
            if not self.same_size:
                self.apart.append(name)
        return decode(facts, _Fresh(self, name), name)


class _Fresh(Mapping[str, Tensor]):
    """The tensors of a value, each made when it is asked for."""

    def __init__(self, fitting: Fitting, name: str) -> None:
        self._fitting, self._name = fitting, name

    def __getitem__(self, path: str) -> Tensor:
        fitting = self._fitting
        found = fitting.find([f"{self._name}/{path}"])
        if found is None:
            raise CheckpointCorrupt("has no such tensor", fitting.path, tensor=path)
        fitting.used.add(found.name)
        chosen = fitting._own(found)
        values = torch.empty(chosen.shape, dtype=DTYPES[chosen.dtype])
        fitting.fresh.append(Target(chosen, 0, values))
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _misfit(saved: SavedTensor, held: Held) -> str | None:
    """How a saved tensor differs from what is here; None if it does not."""
    if saved.shape != held.shape:
        return f"saved as {list(saved.shape)}, here {list(held.shape)}"
    dtype = DTYPES[saved.dtype]
    if dtype != held.values.dtype:
        return f"saved as {dtype}, here {held.values.dtype}"
    return None


def _converts(saved: SavedTensor, held: Held) -> bool:
    return torch.can_cast(DTYPES[saved.dtype], held.values.dtype)


def nbytes_of(targets: Sequence[Target]) -> int:
    """Bytes that are read into them."""
    return sum(math.prod(target.values.shape) * target.values.itemsize for target in targets)
