"""What one rank holds of a model in stages.

::

                   stage 0        stage 1
    replica 0   │  w: copy 0      w: copy 2      w is shared by both stages, and reduced over all
    replica 1   │  w: copy 1      w: copy 3      that have it; so the copies are alike
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from torch import nn

from echelon.errors import ArgumentError
from echelon.held import Held, Holdings, Kept, axes_in, holdings_in, named_state
from echelon.pipeline.parts import Part
from echelon.world.group import Group

__all__ = ["HeldStages"]


@final
@dataclass(frozen=True, slots=True)
class _Shared:
    """A parameter that several stages have.

    Attributes:
        names: in the model, those of the first stage first.
        owners: the ranks of the pipeline that have it, in order.
    """

    names: tuple[str, ...]
    owners: tuple[int, ...]


@final
class HeldStages:
    """The stages of one rank, as ranges of the model.

    Args:
        own: of this rank, by number.
        stages: all, as far as this rank has them.
        placement: the rank of each stage.
        group: the ranks that share the stages.
        replicate: of ``Pipeline``.
        num_ranks: how many share one stage, as far as the stages of any rank know.
    """

    def __init__(
        self,
        own: Mapping[int, nn.Module],
        stages: Sequence[nn.Module | None],
        placement: Sequence[int],
        group: Group,
        replicate: Group | None,
        num_ranks: int,
    ) -> None:
        self._own, self._group = dict(own), group
        self._replicate, self._num_ranks = replicate, num_ranks
        self._shared = _shared(stages, placement)

    @property
    def axes(self) -> tuple[Group, ...]:
        """The groups over which the model is shared."""
        replicate = () if self._replicate is None else (self._replicate,)
        return (self._group, *replicate, *self._stage_axes())

    def _stage_axes(self) -> list[Group]:
        axes = (axis for stage in self._own.values() for axis in axes_in(stage))
        return list({axis.ranks: axis for axis in axes}.values())

    def holdings(self) -> Holdings:
        """What this rank holds, by the names of the model.

        Raises:
            StateError: in the middle of a step of a stage.
            ArgumentError: a tensor cannot be saved; or this rank cannot know how many others have
                the same stages.
        """
        copy, num_copies = self._copies()
        found = holdings_in(
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

    def _as_shared(self, one: Held) -> Held:
        """The same, with the other stages that have it."""
        found = self._shared.get(one.name)
        if found is None:
            return one
        place, num_owners = found.owners.index(self._group.rank), len(found.owners)
        is_reduced = self._replicate is not None or one.num_copies == 1
        return replace(
            one,
            names=found.names,
            copy=place * one.num_copies + one.copy,
            num_copies=num_owners * one.num_copies,
            kept=Kept.EQUAL if is_reduced else one.kept,
        )


def _shared(stages: Sequence[nn.Module | None], placement: Sequence[int]) -> dict[str, _Shared]:
    """The parameters that several stages have, by each of their names."""
    places: dict[nn.Parameter, dict[str, int]] = {}
    for index, stage in enumerate(stages):
        for names, tensor in () if stage is None else named_state(stage):
            if stage is not None and isinstance(tensor, nn.Parameter):
                own = places.setdefault(tensor, {})
                own |= {_name(stage, index, name): index for name in names}
    found: dict[str, _Shared] = {}
    for own in places.values():
        if len(set(own.values())) > 1:
            owners = tuple(sorted({placement[index] for index in own.values()}))
            found |= dict.fromkeys(own, _Shared(tuple(own), owners))
    return found


def _name(stage: nn.Module, index: int, local: str) -> str:
    """The name in the model of what a stage calls ``local``."""
    return local if _has_names_of_model(stage) else f"{index}.{local}"


def _has_names_of_model(stage: nn.Module) -> bool:
    """Whether ``split`` made it; it may be compiled, or wrapped for data parallelism."""
    inner = stage._modules.get("_orig_mod") or stage._modules.get("module")
    return isinstance(stage, Part) or (inner is not None and _has_names_of_model(inner))
