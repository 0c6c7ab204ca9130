"""The objects that ``save`` or ``load`` was given, by kind, and the group that shares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.checkpoint.optimizers import optimizer_section
from echelon.checkpoint.random_states import RandomChanges
from echelon.checkpoint.sections import PER_RANK_PREFIX, Section
from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.state.sharded_state import (
    ModelParts,
    ShardedState,
    ShardsByParam,
    ValuesOfModel,
)
from echelon.state.tensor_shard import Rename, Replication, TensorShard
from echelon.values.encoding import encode

RANDOM = "rng"  # the name of the random generators in a checkpoint


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes it back, such as a scheduler or a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state that ``state_dict`` returned."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointItems:
    """What is saved or loaded, by the names that the user gave.

    Attributes:
        modules: what this rank holds of each model; names begin with that of the model.
        optimizers: the optimizers.
        objects: schedulers, samplers and other objects with a state.
        values: everything else.
        group: the ranks that share all of it; None for one rank alone.
        device: of this rank.
    """

    modules: Mapping[str, ShardedState]
    optimizers: Mapping[str, Optimizer]
    objects: Mapping[str, Stateful]
    values: Mapping[str, object]
    group: Group | None
    device: torch.device

    @classmethod
    def sort(cls, items: Mapping[str, object], group: Group | None) -> CheckpointItems:
        """Sort items by their kind.

        Raises:
            ArgumentError: a name is reserved, or it is not known which ranks share the items.
        """
        for name in items:
            if not name or "/" in name or name in (RANDOM, PER_RANK_PREFIX):
                raise ArgumentError(f"{name!r} cannot be the name of something in a checkpoint")
        models: dict[str, nn.Module] = {}
        beside: dict[str, ValuesOfModel] = {}
        optimizers: dict[str, Optimizer] = {}
        objects: dict[str, Stateful] = {}
        values: dict[str, object] = {}
        for name, item in items.items():
            if isinstance(item, nn.Module):
                models[name] = item
            elif isinstance(item, ValuesOfModel):
                models[name], beside[name] = item.model, item
            elif isinstance(item, Optimizer):
                optimizers[name] = item
            elif isinstance(item, Stateful) and not isinstance(item, type):
                objects[name] = item
            else:
                values[name] = item
        parts = {name: ModelParts([(_under(name), model)]) for name, model in models.items()}
        group = group_of([axis for model in parts.values() for axis in model.axes], group)
        copy, num_copies = _copy_in(group)
        modules = {name: model.state(copy, num_copies) for name, model in parts.items()}
        modules |= {name: values.values_in(modules[name]) for name, values in beside.items()}
        return cls(
            modules=modules,
            optimizers=optimizers,
            objects=objects,
            values=values,
            group=group,
            device=torch.device("cpu") if group is None else group.device,
        )

    @property
    def names(self) -> list[str]:
        """The names of all items, sorted."""
        return sorted([*self.modules, *self.optimizers, *self.objects, *self.values])

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each item, by name."""
        by_kind = {"module": self.modules, "optimizer": self.optimizers}
        by_kind |= {"object": self.objects, "value": self.values}
        return {name: kind for kind, items in by_kind.items() for name in sorted(items)}

    @property
    def shards_by_param(self) -> ShardsByParam:
        """The ranges of every parameter of the models."""
        by_param: dict[nn.Parameter, tuple[TensorShard, ...]] = {}
        for state in self.modules.values():
            by_param = {**state.params, **by_param}
        return by_param

    def sections(self, *, rng: bool) -> dict[str, Section]:
        """What this rank saves, by name; with ``rng``, the random generators are included.

        Raises:
            ArgumentError: a value cannot be saved.
            UnsupportedError: the state of an optimizer cannot be assembled from shards.
        """
        sections: dict[str, Section] = {}
        for name, state in self.modules.items():
            sections[name] = self._module_section(state)
        for name, optimizer in self.optimizers.items():
            sections[name] = optimizer_section(name, optimizer, self.shards_by_param)
        for name, stateful in self.objects.items():
            sections[name] = self._value_section("object", name, stateful.state_dict())
        for name, value in self.values.items():
            sections[name] = self._value_section("value", name, value)
        if rng:
            states = RandomChanges(self.device).states()
            sections[RANDOM] = self._value_section("random", RANDOM, states)
        return sections

    def _module_section(self, state: ShardedState) -> Section:
        tensors = list(state.tensors)
        facts = {}
        for extra in state.extras:
            state = extra.module.get_extra_state()
            facts[extra.name], of_extra = self._encoded(extra.name, state)
            tensors += of_extra
        return Section(kind="module", facts=facts, tensors=tuple(tensors))

    def _value_section(self, kind: str, name: str, value: object) -> Section:
        facts, tensors = self._encoded(name, value)
        return Section(kind=kind, facts=facts, tensors=tuple(tensors))

    def _encoded(self, name: str, value: object) -> tuple[Any, list[TensorShard]]:
        facts, tensors = encode(value, name)
        copy, num_copies = _copy_in(self.group)
        return facts, [
            TensorShard(
                names=(f"{name}/{path}",),
                shape=tuple(tensor.shape),
                start=0,
                values=tensor.detach(),
                copy=copy,
                num_copies=num_copies,
                replication=Replication.PER_RANK,
            )
            for path, tensor in tensors.items()
        ]


def _under(name: str) -> Rename:
    """Names in a checkpoint of names in the model ``name``."""
    return lambda inner: f"{name}/{inner}"


def _copy_in(group: Group | None) -> tuple[int, int]:
    """This rank's index among the ranks that share everything, and their number."""
    return (0, 1) if group is None else (group.rank, group.size)


def group_of(axes: Sequence[Group], given: Group | None) -> Group | None:
    """The group of all ranks that share the models; None if this rank alone has them.

    Args:
        axes: the groups over which parts of the models are shared.
        given: the user's group; None: the group is derived from ``axes``.

    Raises:
        ArgumentError: ``given`` is no group or lacks ranks, or no known group has exactly the ranks
            that share the models.
    """
    if given is not None and not isinstance(given, Group):
        raise ArgumentError(f"group is {given!r:.80}; give a Group, such as world.group")
    ranks = {rank for axis in axes for rank in axis.ranks}
    if given is not None:
        if missing := sorted(ranks.difference(given.ranks)):
            raise ArgumentError(
                f"group has ranks {list(given.ranks)}, and the model is shared with ranks "
                f"{missing}, too: give a group of all ranks that share it, such as world.group"
            )
        return given
    if not axes:
        return None
    size = prod(len(ranks) for ranks in _independent(axes))
    for axis in axes:
        for group in _with_ancestors(axis):
            if group.size == size and ranks.issubset(group.ranks):
                return group
    text = ", ".join(f"{list(axis.ranks)} ({axis.name})" for axis in axes)
    raise ArgumentError(
        f"the model is shared over ranks {text}, which makes {size} ranks, and none of these "
        "groups was made from a group of so many: give group=, that of all ranks that share it"
    )


def _independent(axes: Sequence[Group]) -> set[frozenset[int]]:
    """The ranks of each axis that is no part of another one."""
    ranks = {frozenset(axis.ranks) for axis in axes}
    return {members for members in ranks if not any(members < others for others in ranks)}


def _with_ancestors(group: Group) -> Iterator[Group]:
    """A group, its parent, the parent of that, and so on."""
    ancestor: Group | None = group
    while ancestor is not None:
        yield ancestor
        ancestor = ancestor.parent
