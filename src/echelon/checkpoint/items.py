"""What a call of ``save`` or ``load`` was given, sorted by what it is, and which ranks share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.checkpoint.optimizers import optimizer_section
from echelon.checkpoint.random_states import random_states
from echelon.checkpoint.sections import Section
from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.state.sharded_state import ShardedState, ShardsByParam, axes_in, sharded_state_of
from echelon.state.tensor_shard import Replication, TensorShard
from echelon.values.encoding import encode

RANDOM = "rng"  # the name of the random generators in a checkpoint


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes it back, such as a scheduler or a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take them back."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointItems:
    """What is saved or loaded, by the names that the user gave.

    Attributes:
        modules: what this rank holds of each model; names begin with that of the model.
        optimizers: by name.
        objects: what has a state.
        values: everything else.
        group: the ranks that share it; None for one rank alone.
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
        """Sort what was given.

        Raises:
            ArgumentError: several ranks share it, and which is not known.
        """
        for name in items:
            if not name or "/" in name or name in (RANDOM, "own"):
                raise ArgumentError(f"{name!r} cannot be the name of something in a checkpoint")
        models = {name: one for name, one in items.items() if isinstance(one, nn.Module)}
        group = group_of(list(models.values()), group)
        optimizers = {name: one for name, one in items.items() if isinstance(one, Optimizer)}
        rest = {name: one for name, one in items.items() if name not in models | optimizers}
        objects = {
            name: one
            for name, one in rest.items()
            if isinstance(one, Stateful) and not isinstance(one, type)
        }
        return cls(
            modules={name: _under(name, holdings_of(one, group)) for name, one in models.items()},
            optimizers=optimizers,
            objects=objects,
            values={name: one for name, one in rest.items() if name not in objects},
            group=group,
            device=torch.device("cpu") if group is None else group.device,
        )

    @property
    def names(self) -> list[str]:
        """Of all that was given, in order of the alphabet."""
        return sorted([*self.modules, *self.optimizers, *self.objects, *self.values])

    @property
    def kinds(self) -> dict[str, str]:
        """What each of them is."""
        sorts = {"module": self.modules, "optimizer": self.optimizers}
        sorts |= {"object": self.objects, "value": self.values}
        return {name: kind for kind, own in sorts.items() for name in sorted(own)}

    @property
    def shards_by_param(self) -> ShardsByParam:
        """The ranges of every parameter of the models."""
        by_param: dict[nn.Parameter, tuple[TensorShard, ...]] = {}
        for state in self.modules.values():
            by_param = {**state.params, **by_param}
        return by_param

    def sections(self, *, rng: bool) -> dict[str, Section]:
        """What this rank saves, by name.

        Args:
            rng: whether that of the random generators, too.

        Raises:
            ArgumentError: a value cannot be saved.
            UnsupportedError: the state of an optimizer cannot be put together from parts.
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
            sections[RANDOM] = self._value_section("random", RANDOM, random_states(self.device))
        return sections

    def _module_section(self, state: ShardedState) -> Section:
        tensors = list(state.tensors)
        facts = {}
        for extra in state.extras:
            facts[extra.name], own = self._encoded(extra.name, extra.module.get_extra_state())
            tensors += own
        return Section(kind="module", facts=facts, tensors=tuple(tensors))

    def _value_section(self, kind: str, name: str, value: object) -> Section:
        facts, tensors = self._encoded(name, value)
        return Section(kind=kind, facts=facts, tensors=tuple(tensors))

    def _encoded(self, name: str, value: object) -> tuple[Any, list[TensorShard]]:
        facts, tensors = encode(value, name)
        copy, num_copies = (0, 1) if self.group is None else (self.group.rank, self.group.size)
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


def _under(name: str, state: ShardedState) -> ShardedState:
    return state.renamed(lambda inner: f"{name}/{inner}")


def holdings_of(module: nn.Module, group: Group | None) -> ShardedState:
    """What this rank holds of ``module``. Nothing is communicated.

    ``DDP``, ``FSDP`` and ``Pipeline``, also where they are parts of it, say what they hold. Of the
    rest, every rank of ``group`` has a copy that nobody keeps like the others.

    Args:
        group: the ranks that have the module; None: this one alone.

    Raises:
        StateError: in the middle of a step.
        ArgumentError: a tensor cannot be saved or loaded; names it.

    Example:
        >>> [one.name for one in holdings_of(nn.Linear(2, 1), None).tensors]
        ['weight', 'bias']
    """
    copy, num_copies = (0, 1) if group is None else (group.rank, group.size)
    return sharded_state_of([(str, module)], copy=copy, num_copies=num_copies)


def group_of(modules: Sequence[nn.Module], given: Group | None) -> Group | None:
    """The group of all ranks that share ``modules``.

    Args:
        given: what the user said; None: it is found by the groups that the modules are shared over.

    Returns:
        None if nothing was given and no module is shared: this rank is alone.

    Raises:
        ArgumentError: ``given`` is no group or lacks ranks, or no group is known that has just the
            ranks that share the modules.
    """
    if given is not None and not isinstance(given, Group):
        raise ArgumentError(f"group is {given!r:.80}; give a Group, such as world.group")
    axes = [axis for module in modules for axis in axes_in(module)]
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
    size = prod(len(own) for own in _independent(axes))
    for axis in axes:
        for group in _upwards(axis):
            if group.size == size and ranks.issubset(group.ranks):
                return group
    text = ", ".join(f"{list(axis.ranks)} ({axis.name})" for axis in axes)
    raise ArgumentError(
        f"the model is shared over ranks {text}, which makes {size} ranks, and none of these "
        "groups was made from a group of so many: give group=, that of all ranks that share it"
    )


def _independent(axes: Sequence[Group]) -> set[frozenset[int]]:
    """The ranks of each axis, without those that are inside of another."""
    every = {frozenset(axis.ranks) for axis in axes}
    return {own for own in every if not any(own < other for other in every)}


def _upwards(group: Group) -> Iterator[Group]:
    """A group, and those that it comes from."""
    found: Group | None = group
    while found is not None:
        yield found
        found = found.parent
