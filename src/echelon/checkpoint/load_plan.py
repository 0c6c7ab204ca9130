"""Where the tensors of a step belong on this rank, and what of them does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from echelon.checkpoint.format import Manifest
from echelon.checkpoint.records import SavedTensor
from echelon.checkpoint.sections import Json, parse_per_rank_name, per_rank_name
from echelon.errors import CheckpointCorrupt
from echelon.state.tensor_shard import Replication, TensorShard
from echelon.values.decoding import decode
from echelon.values.value_types import DTYPES, nbytes_of

# A forged manifest may not ask for more new memory than so many times the bytes of the step; tied
# tensors may be separate here.
_MAX_COPIES = 16


class ReadItem(NamedTuple):
    """Memory that a range of a saved tensor is read into.

    Attributes:
        saved: the tensor.
        start: first element of the range, in the flattened tensor.
        values: the memory.
    """

    saved: SavedTensor
    start: int
    values: Tensor


@final
@dataclass(kw_only=True, eq=False)
class LoadPlan:
    """What one rank reads from a checkpoint, planned before a byte of it moves.

    Attributes:
        manifest: of the step.
        path: of the step, for messages.
        rank: the rank that loads.
        size: how many ranks load.
        in_place: memory that the user sees already; it is written when all bytes are verified.
        new: memory that the user does not see yet.
        used: names in the step that have a place here.
        missing: names that the step does not have.
        differing: why something does not fit, or was converted to another dtype, by name.
        not_restored: names whose values differed between ranks and are not given back to each
            rank, because another number of ranks loads.
        ties: further names of what is one tensor here and several in the step, with the one that
            is read and that of the name, which has to be equal.
    """

    manifest: Manifest
    path: str
    rank: int
    size: int
    in_place: list[ReadItem] = field(default_factory=list)
    new: list[ReadItem] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    differing: dict[str, str] = field(default_factory=dict)
    not_restored: list[str] = field(default_factory=list)
    ties: dict[str, tuple[SavedTensor, SavedTensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = self.manifest.tensors.values()
        self._by_name = {name: saved for saved in tensors for name in (saved.name, *saved.ties)}
        parsed = map(parse_per_rank_name, self.manifest.tensors)
        self._names_saved_per_rank = {name for name in parsed if name is not None}
        nbytes = sum(nbytes_of(saved.dtype, saved.shape) for saved in tensors)
        self._max_nbytes = _MAX_COPIES * nbytes
        self._claimed_nbytes = 0
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
        """The first tensor that has one of these names."""
        return next(iter(self._found(names).values()), None)

    def _found(self, names: Sequence[str]) -> dict[str, SavedTensor]:
        """The tensors that have one of these names, by their own."""
        found = [self._by_name[name] for name in names if name in self._by_name]
        return {saved.name: saved for saved in found}

    def count_new_memory(self, nbytes: int) -> None:
        """Count new memory, and refuse a step that asks for far more than its tensors take.

        Raises:
            CheckpointCorrupt: the manifest is damaged or forged.
        """
        self._claimed_nbytes += nbytes
        if self._claimed_nbytes > self._max_nbytes:
            raise CheckpointCorrupt(
                f"asks for more than {self._max_nbytes} bytes of memory, which is {_MAX_COPIES} "
                "times what its tensors take",
                self.path,
            )

    def match(self, shard: TensorShard, dtype: torch.dtype) -> SavedTensor | None:
        """Find the tensor that a range is read from; None if the checkpoint has none that fits.

        What does not fit is recorded for the report to the user.

        Args:
            dtype: of the memory that the range is read into.
        """
        found = self._found(shard.names)
        if not found:
            self.missing.append(shard.name)
            return None
        self.used.update(found)
        if shard.replication is Replication.PER_RANK:
            of_all = found.items()
            found = {name: self._tensor_of_this_rank(one, self.same_size) for name, one in of_all}
        (_, saved), *others = found.items()
        self.ties.update((name, (saved, other)) for name, other in others)
        saved_dtype = DTYPES[saved.dtype]
        if saved.shape != shard.shape:
            problem = f"saved as {list(saved.shape)}, here {list(shard.shape)}"
            self.differing[shard.name] = problem
            return None
        if saved_dtype != dtype:
            self.differing[shard.name] = f"saved as {saved_dtype}, here {dtype}"
        return saved if torch.can_cast(saved_dtype, dtype) else None

    def add_read(self, shard: TensorShard) -> None:
        """Have a range of the model read into its memory, if the step has it and it fits."""
        saved = self.match(shard, shard.values.dtype)
        if saved is not None:
            self.in_place.append(ReadItem(saved, shard.start, shard.values))

    def _tensor_of_this_rank(self, saved: SavedTensor, restores_per_rank: bool) -> SavedTensor:
        """This rank's values of a tensor whose values may differ between ranks."""
        if saved.name not in self._names_saved_per_rank:
            return saved
        if not self.same_size:
            self.not_restored.append(saved.name)
        name = per_rank_name(self.rank, saved.name)
        return self.manifest.tensors.get(name, saved) if restores_per_rank else saved

    def value(self, section: Json, name: str, *, restores_per_rank: bool | None = None) -> Any:
        """A value as it was saved; its tensors have memory that is read later.

        Args:
            restores_per_rank: whether this rank gets the values that it saved itself, where they
                differed between ranks; None: if as many ranks load as have saved.
        """
        if restores_per_rank is None:
            restores_per_rank = self.same_size
        facts = section.get("value")
        if "by_rank" in section:
            facts = section["by_rank"][self.rank if restores_per_rank else 0]
            if not self.same_size:
                self.not_restored.append(name)
        return decode(facts, _NewTensors(self, name, restores_per_rank), f"{self.path}: {name}")

    def differing_members(self, section: Json, name: str) -> set[str]:
        """The members of a dict whose values differed between the ranks that saved."""
        by_rank = [facts for facts in section.get("by_rank", ()) if isinstance(facts, dict)]
        keys = {key for facts in by_rank for key in facts if facts[key] != by_rank[0].get(key)}
        paths = (path.split("/") for path in self._names_saved_per_rank)
        return keys | {path[1] for path in paths if path[0] == name and len(path) > 1}

    @torch.inference_mode(mode=False)  # the memory outlives the caller's mode
    def new_value(self, name: str, restores_per_rank: bool) -> Tensor:
        """The memory of a tensor of a value, which is read later; each tensor has one memory.

        Raises:
            KeyError: the step has no such tensor.
        """
        shared = self.find([name])
        if shared is None:
            raise KeyError(name)
        self.used.add(shared.name)
        if shared.name not in self._values:
            saved = self._tensor_of_this_rank(shared, restores_per_rank)
            self.count_new_memory(nbytes_of(saved.dtype, saved.shape))
            values = torch.empty(saved.shape, dtype=DTYPES[saved.dtype], device="cpu")
            self.new.append(ReadItem(saved, 0, values))
            self._values[shared.name] = values
        return self._values[shared.name]


class _NewTensors(Mapping[str, Tensor]):
    """The tensors of a value; memory for each is allocated when it is first looked up."""

    def __init__(self, plan: LoadPlan, name: str, restores_per_rank: bool) -> None:
        self._plan, self._name, self._restores_per_rank = plan, name, restores_per_rank

    def __getitem__(self, path: str) -> Tensor:
        return self._plan.new_value(f"{self._name}/{path}", self._restores_per_rank)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
