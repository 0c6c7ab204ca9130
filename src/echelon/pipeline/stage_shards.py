"""What one rank holds of a model in stages, for checkpoints.

::

                   stage 0        stage 1
    replica 0   │  w: copy 0      w: copy 2      w is shared by both stages, and reduced over all
    replica 1   │  w: copy 1      w: copy 3      that have it; so the copies are alike
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from torch import nn

from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.pipeline.stage_initialization import find_submodule
from echelon.state.sharded_state import ShardedState, axes_in, named_state, sharded_state_of
from echelon.state.tensor_shard import Replication, TensorShard


@final
@dataclass(frozen=True, slots=True)
class _Shared:
    """A tensor that several stages may have.

    Attributes:
        names: in the model, those of the first stage first.
        owners: the ranks of the pipeline that have it, in order.
    """

    names: tuple[str, ...]
    owners: tuple[int, ...]


@final
class StageShards:
    """The stages of one rank as shards of the model. All ranks of ``group`` make one.

    Args:
        local: the stages of this rank, by number.
        stages: all, as far as this rank has them.
        group: the ranks that share the stages.
        replicate: of ``Pipeline``.
        num_ranks: how many share one stage, as far as the stages of any rank know.
    """

    def __init__(
        self,
        local: Mapping[int, nn.Module],
        stages: Sequence[nn.Module | None],
        group: Group,
        replicate: Group | None,
        num_ranks: int,
    ) -> None:
        self._local, self._group = dict(local), group
        self._replicate, self._num_ranks = replicate, num_ranks
        names_by_rank = group.all_gather_object([*_names_of_shared(local, stages)])
        self._shared = _merge_shared(names_by_rank)

    @property
    def axes(self) -> tuple[Group, ...]:
        """The groups over which the model is sharded or replicated."""
        replicate = () if self._replicate is None else (self._replicate,)
        return (self._group, *replicate, *self._stage_axes())

    def _stage_axes(self) -> list[Group]:
        axes = (axis for stage in self._local.values() for axis in axes_in(stage))
        return list({axis.ranks: axis for axis in axes}.values())

    def holdings(self) -> ShardedState:
        """The shards that this rank holds, by the names of the model.

        Raises:
            StateError: in the middle of a step of a stage.
            ArgumentError: a tensor cannot be saved; or this rank cannot know how many others have
                the same stages.
        """
        copy, num_copies = self._copies()
        state = sharded_state_of(
            [(partial(_name, stage, index), stage) for index, stage in self._local.items()],
            copy=copy,
            num_copies=num_copies,
        )
        return replace(state.changed(self._with_owners), axes=self.axes)

    def _copies(self) -> tuple[int, int]:
        """The number of this rank among those that have the same stages, and how many they are."""
        axes = self._stage_axes() if self._replicate is None else [self._replicate]
        copy, num_copies = 0, 1
        for axis in axes:
            copy, num_copies = copy * axis.size + axis.rank, num_copies * axis.size
        if num_copies < self._num_ranks:
            raise ArgumentError(
                f"stages {list(self._local)} of this rank are in no DDP or FSDP, and another stage "
                f"is shared by {self._num_ranks} ranks, so it is not known which ranks have these: "
                "give ec.Pipeline replicate=, the ranks that have the same stages; ec.parallelize "
                "does"
            )
        return copy, num_copies

    def _with_owners(self, shard: TensorShard) -> TensorShard:
        """The same shard, with the names and the copies of all stages that have the tensor."""
        shared = self._shared.get(shard.name)
        if shared is None:
            return shard
        position, num_owners = shared.owners.index(self._group.rank), len(shared.owners)
        replication = shard.replication
        if not isinstance(shard.tensor, nn.Parameter):
            if num_owners > 1:
                replication = Replication.PER_RANK  # every stage changes its buffer
        elif self._replicate is not None or shard.num_copies == 1:
            replication = Replication.IDENTICAL  # it is reduced over all that have it
        return replace(
            shard,
            names=shared.names,
            copy=position * shard.num_copies + shard.copy,
            num_copies=num_owners * shard.num_copies,
            replication=replication,
        )


def _names_of_shared(
    local: Mapping[int, nn.Module], stages: Sequence[nn.Module | None]
) -> Iterator[tuple[str, ...]]:
    """The names of each tensor of this rank that other stages may have, too.

    These are the parameters that several of the known stages have, and all buffers: a rank that was
    not given the stages of others cannot know which buffers they share.
    """
    names: dict[int, dict[str, None]] = {}  # by tensor, in order
    stages_of: dict[int, set[int]] = {}  # by tensor
    for index, stage in enumerate(stages):
        if stage is not None:
            for local_names, tensor in named_state(stage):
                full_names = dict.fromkeys(_name(stage, index, name) for name in local_names)
                names.setdefault(id(tensor), {}).update(full_names)
                stages_of.setdefault(id(tensor), set()).add(index)
    for stage in local.values():
        for _, tensor in named_state(stage):
            if not isinstance(tensor, nn.Parameter) or len(stages_of[id(tensor)]) > 1:
                yield tuple(names[id(tensor)])


def _merge_shared(names_by_rank: Sequence[Sequence[tuple[str, ...]]]) -> dict[str, _Shared]:
    """The tensors that ranks share, by each of their names.

    Args:
        names_by_rank: the names of each tensor.
    """
    merged: dict[str, tuple[dict[str, None], set[int]]] = {}
    for rank, tensors in enumerate(names_by_rank):
        for names in tensors:
            all_names: dict[str, None] = {}
            owners = {rank}
            for known_names, known_owners in [merged[name] for name in names if name in merged]:
                all_names |= known_names
                owners |= known_owners
            all_names |= dict.fromkeys(names)
            merged |= dict.fromkeys(all_names, (all_names, owners))
    return {
        name: _Shared(tuple(names), tuple(sorted(owners)))
        for name, (names, owners) in merged.items()
    }


def _name(stage: nn.Module, index: int, local: str) -> str:
    """The name in the model of what a stage calls ``local``."""
    return f"{index}.{local}" if find_submodule(stage) is None else local
