"""What a call of ``save`` or ``load`` was given, sorted by what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.checkpoint.modules import group_of, holdings_of
from echelon.checkpoint.optimizers import Owners, optimizer_part
from echelon.checkpoint.part import Part
from echelon.checkpoint.random_states import random_states
from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.state.sharded_state import ShardedState
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
class Contents:
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
    def sort(cls, items: Mapping[str, object], group: Group | None) -> Contents:
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
    def owners(self) -> Owners:
        """The ranges of every parameter of the models."""
        found: dict[nn.Parameter, tuple[TensorShard, ...]] = {}
        for holdings in self.modules.values():
            for param, own in holdings.params.items():
                found.setdefault(param, own)
        return found

    def parts(self, *, rng: bool) -> dict[str, Part]:
        """What this rank saves, by name.

        Args:
            rng: whether that of the random generators, too.

        Raises:
            ArgumentError: a value cannot be saved.
            UnsupportedError: the state of an optimizer cannot be put together from parts.
        """
        found: dict[str, Part] = {}
        for name, holdings in self.modules.items():
            found[name] = self._module_part(name, holdings)
        for name, optimizer in self.optimizers.items():
            found[name] = optimizer_part(name, optimizer, self.owners)
        for name, one in self.objects.items():
            found[name] = self._value_part("object", name, one.state_dict())
        for name, value in self.values.items():
            found[name] = self._value_part("value", name, value)
        if rng:
            found[RANDOM] = self._value_part("random", RANDOM, random_states(self.device))
        return found

    def _module_part(self, name: str, holdings: ShardedState) -> Part:
        tensors = list(holdings.tensors)
        facts = {}
        for extra in holdings.extras:
            facts[extra.name], own = self._encoded(extra.name, extra.module.get_extra_state())
            tensors += own
        return Part(kind="module", facts=facts, tensors=tuple(tensors))

    def _value_part(self, kind: str, name: str, value: object) -> Part:
        facts, tensors = self._encoded(name, value)
        return Part(kind=kind, facts=facts, tensors=tuple(tensors))

    def _encoded(self, name: str, value: object) -> tuple[Any, list[TensorShard]]:
        facts, tensors = encode(value, name)
        copy = (0, 1) if self.group is None else (self.group.rank, self.group.size)
        return facts, [
            TensorShard(
                names=(f"{name}/{path}",),
                shape=tuple(one.shape),
                start=0,
                values=one.detach(),
                copy=copy[0],
                num_copies=copy[1],
                replication=Replication.PER_RANK,
            )
            for path, one in tensors.items()
        ]


def _under(name: str, holdings: ShardedState) -> ShardedState:
    return holdings.renamed(lambda inner: f"{name}/{inner}")
