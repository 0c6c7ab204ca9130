"""The ranks of a model in hybrid sharding (HSDP): a shard group, and the replicas of each shard.

Without hybrid strategies there is one shard group, and no replicas.

::

    world.mesh(replicate=2, shard=3)      rank 0 | rank 1 | rank 2     <- a shard group
                                          rank 3 | rank 4 | rank 5     <- another shard group
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
        shard: the ranks that share the parameters, by all-gathers and reduce-scatters.
        replicas: the ranks with the same shard as this one; None where no other rank has it.
        unshard: the ranks of ``shard``, for all-gathers. Ranks that skip units interleave unshards
            and reductions differently, so each of the two needs a communicator of its own.
    """

    shard: Group
    replicas: Group | None
    unshard: Group

    @classmethod
    def of(cls, shard: Group, replicas: Group | None) -> HybridGroups:
        """Groups whose all-gathers and reductions share a communicator."""
        return cls(shard, replicas, shard)

    def separated(self) -> HybridGroups:
        """The same, with a communicator for all-gathers. All ranks call it.

        All models of the shard group use one: it lives as long as the group, and on an accelerator
        takes memory and threads.
        """
        if self.shard.size == 1:
            return self
        belongings = self.shard.belongings
        if HybridGroups not in belongings:
            belongings[HybridGroups] = self.shard.subgroup(range(self.shard.size))
        unshard = belongings[HybridGroups]
        assert isinstance(unshard, Group), "this rank is in its own group"
        return replace(self, unshard=unshard)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups over which a value has to be combined one after another, to reach all ranks."""
        return (self.shard,) if self.replicas is None else (self.replicas, self.shard)

    @property
    def copy_of_shard(self) -> tuple[int, int]:
        """The index of this rank among those with the same shard, and their number."""
        return (0, 1) if self.replicas is None else (self.replicas.rank, self.replicas.size)

    @property
    def copy_of_all(self) -> tuple[int, int]:
        """The index of this rank among all ranks, replica by replica, and their number."""
        replica, num_replicas = self.copy_of_shard
        return replica * self.shard.size + self.shard.rank, num_replicas * self.shard.size

    def broadcast(self, tensor: Tensor, label: str) -> None:
        """Send the first rank's ``tensor`` to its replicas, and from each to its shard group."""
        for group in self.groups:
            if group.size > 1:
                group.broadcast(tensor, 0, label=label)

    def broadcast_object(self, item: Any) -> Any:
        """The ``item`` of the first rank."""
        for group in self.groups:
            item = group.broadcast_object(item)
        return item

    def all_gather_object(self, item: Any, label: str | None = None) -> list[Any]:
        """The ``item`` of every rank: those of the first shard group, then those of the next."""
        items = self.shard.all_gather_object(item, label=label)
        if self.replicas is None:
            return items
        by_group = self.replicas.all_gather_object(items, label=label)
        return [item for others in by_group for item in others]

    def all_reduce(self, tensor: Tensor, op: str, label: str) -> None:
        """All-reduce over all ranks."""
        for group in self.groups:
            if group.size > 1:
                group.all_reduce(tensor, op, label=label)

    def barrier_if_shared(self, what: str) -> None:
        """Where shards are in shared memory, wait for all ranks that share it."""
        if self.shard.shares_memory and self.shard.size > 1:
            self.shard.barrier(label=what)
