"""The ranks of a sharded model: those that it is sharded over, and those with the same shard.

::

    world.mesh(replicate=2, shard=3)      rank 0 | rank 1 | rank 2     <- one group that shards
                                          rank 3 | rank 4 | rank 5     <- another one
                                             └ ranks 0 and 3 have the same shard
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor

from echelon.comm.group import Group


@final
@dataclass(frozen=True, slots=True)
class HybridGroups:
    """All ranks of a sharded model, seen from one of them.

    Attributes:
        shard: those that share the parameters; all-gathers and reduce-scatters stay inside.
        replicas: those with the same shard as this one; None where no other has it.
        unshard: the ranks of ``shard``, for all-gathers. Ranks that skip units unshard and reduce
            in different turns, so where either communicates each needs an order of its own.
    """

    shard: Group
    replicas: Group | None
    unshard: Group

    @classmethod
    def of(cls, shard: Group, replicas: Group | None) -> HybridGroups:
        """All of them; all-gathers are not separate yet."""
        return cls(shard, replicas, shard)

    def separated(self) -> HybridGroups:
        """The same, with a communicator for all-gathers. All ranks call it."""
        if self.shard.size == 1:
            return self
        unshard = self.shard.subgroup(range(self.shard.size))
        assert unshard is not None, "this rank is in its own group"
        return replace(self, unshard=unshard)

    @property
    def groups(self) -> tuple[Group, ...]:
        """What agrees on all of these agrees everywhere."""
        return (self.shard,) if self.replicas is None else (self.replicas, self.shard)

    @property
    def copy_of_shard(self) -> tuple[int, int]:
        """Which of those with the same shard this rank is, and how many they are."""
        return (0, 1) if self.replicas is None else (self.replicas.rank, self.replicas.size)

    @property
    def copy_of_all(self) -> tuple[int, int]:
        """Which of all ranks this one is, and how many they are: replica by replica."""
        replica, num_replicas = self.copy_of_shard
        return replica * self.shard.size + self.shard.rank, num_replicas * self.shard.size

    def broadcast(self, tensor: Tensor, label: str) -> None:
        """Give the first rank's ``tensor`` to all: to its replicas, and each on to its group."""
        for group in self.groups:
            if group.size > 1:
                group.broadcast(tensor, 0, label=label)

    def broadcast_object(self, item: Any) -> Any:
        """The first rank's ``item``."""
        for group in self.groups:
            item = group.broadcast_object(item)
        return item

    def all_gather_object(self, item: Any) -> list[Any]:
        """The ``item`` of every rank: those of the first group, then those of the next."""
        items = self.shard.all_gather_object(item)
        if self.replicas is None:
            return items
        return [item for others in self.replicas.all_gather_object(items) for item in others]

    def all_reduce(self, tensor: Tensor, op: str, label: str) -> None:
        """Reduce over all ranks."""
        for group in self.groups:
            if group.size > 1:
                group.all_reduce(tensor, op, label=label)

    def barrier_if_shared(self, what: str) -> None:
        """Where shards are shared memory, wait until all who share them are here."""
        if self.shard.shares_memory and self.shard.size > 1:
            self.shard.barrier(label=what)
