"""What one rank holds of a model in stages.

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
    """The stages of one rank, as ranges of the model. All ranks of ``group`` make one.

    Args:
        own: of this rank, by number.
        stages: all, as far as this rank has them.
        group: the ranks that share the stages.
        replicate: of ``Pipeline``.
        num_ranks: how many share one stage, as far as the stages of any rank know.
    """

    def __init__(
        self,
        own: Mapping[int, nn.Module],
        stages: Sequence[nn.Module | None],
        group: Group,
        replicate: Group | None,
        num_ranks: int,
    ) -> None:
        self._own, self._group = dict(own), group
        self._replicate, self._num_ranks = replicate, num_ranks
        told: list[list[tuple[str, ...]]] = group.all_gather_object([*_shared(own, stages)])
        self._shared = _together(told)

    @property
    def axes(self) -> tuple[Group, ...]:
        """The groups over which the model is shared."""
        replicate = () if self._replicate is None else (self._replicate,)
        return (self._group, *replicate, *self._stage_axes())

    def _stage_axes(self) -> list[Group]:
        axes = (axis for stage in self._own.values() for axis in axes_in(stage))
        return list({axis.ranks: axis for axis in axes}.values())

    def holdings(self) -> ShardedState:
        """What this rank holds, by the names of the model.

        Raises:
            StateError: in the middle of a step of a stage.
            ArgumentError: a tensor cannot be saved; or this rank cannot know how many others have
                the same stages.
        """
        copy, num_copies = self._copies()
        found = sharded_state_of(
            [(partial(_name, stage, index), stage) for index, stage in self._own.items()],
            copy=copy,
            num_copies=num_copies,
        )
        return replace(found.changed(self._as_shared), axes=self.axes)

    def _copies(self) -> tuple[int, int]:
        """Which of those that have the same stages this rank is, and how many they are."""
        axes = self._stage_axes() if self._replicate is None else [self._replicate]
        copy, num_copies = 0, 1
        for axis in axes:
            copy, num_copies = copy * axis.size + axis.rank, num_copies * axis.size
        if num_copies < self._num_ranks:
            raise ArgumentError(
                f"stages {list(self._own)} of this rank are in no DDP or FSDP, and another stage "
                f"is shared by {self._num_ranks} ranks, so it is not known which ranks have these: "
                "give ec.Pipeline replicate=, the ranks that have the same stages; ec.parallelize "
                "does"
            )
        return copy, num_copies

    def _as_shared(self, one: TensorShard) -> TensorShard:
        """The same, with the other stages that have it."""
        found = self._shared.get(one.name)
        if found is None:
            return one
        place, num_owners = found.owners.index(self._group.rank), len(found.owners)
        replication = one.replication
        if not isinstance(one.tensor, nn.Parameter):
            if num_owners > 1:
                replication = Replication.PER_RANK  # every stage changes its own
        elif self._replicate is not None or one.num_copies == 1:
            replication = Replication.IDENTICAL  # it is reduced over all that have it
        return replace(
            one,
            names=found.names,
            copy=place * one.num_copies + one.copy,
            num_copies=num_owners * one.num_copies,
            replication=replication,
        )


def _shared(
    own: Mapping[int, nn.Module], stages: Sequence[nn.Module | None]
) -> Iterator[tuple[str, ...]]:
    """The names of what this rank has and others may have, too.

    Those are parameters of which several stages are known to be theirs. Who was not given the
    stages of others cannot know it of buffers, so these are all of them.
    """
    names: dict[int, dict[str, None]] = {}  # by tensor, in order
    places: dict[int, set[int]] = {}
    for index, stage in enumerate(stages):
        if stage is not None:
            for local, tensor in named_state(stage):
                full = dict.fromkeys(_name(stage, index, one) for one in local)
                names.setdefault(id(tensor), {}).update(full)
                places.setdefault(id(tensor), set()).add(index)
    for stage in own.values():
        for _, tensor in named_state(stage):
            if not isinstance(tensor, nn.Parameter) or len(places[id(tensor)]) > 1:
                yield tuple(names[id(tensor)])


def _together(told: Sequence[Sequence[tuple[str, ...]]]) -> dict[str, _Shared]:
    """What ranks share, by each of its names.

    Args:
        told: by rank, the names of each tensor.
    """
    found: dict[str, tuple[dict[str, None], set[int]]] = {}
    for rank, tensors in enumerate(told):
        for names in tensors:
            all_names: dict[str, None] = {}
            owners = {rank}
            for known_names, known_owners in [found[name] for name in names if name in found]:
                all_names |= known_names
                owners |= known_owners
            all_names |= dict.fromkeys(names)
            found |= dict.fromkeys(all_names, (all_names, owners))
    return {
        name: _Shared(tuple(names), tuple(sorted(owners)))
        for name, (names, owners) in found.items()
    }


def _name(stage: nn.Module, index: int, local: str) -> str:
    """The name in the model of what a stage calls ``local``."""
    return f"{index}.{local}" if find_submodule(stage) is None else local
