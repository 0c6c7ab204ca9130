"""``Layout``: how ranks share a model and a batch, with the axes that a ``Plan`` has and more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

from echelon.checks import integer, one_of
from echelon.errors import ArgumentError
from echelon.planner.schedule_cost import SCHEDULES, ScheduleCost


class ShardedStates(Enum):
    """What the ranks of a shard group keep parts of.

    The stages are those of ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5).
    """

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class HostStates(Enum):
    """What lies in the memory of the host; as ``echelon.Offload``."""

    NOTHING = "none"
    OPTIMIZER = "optimizer"  # with the shards and their gradients; the device has 16-bit shards
    ALL = "all"  # the device has nothing of a block that is sharded


class Recompute(Enum):
    """What is computed again in the backward instead of kept."""

    NOTHING = "none"
    ATTENTION = "selective"
    BLOCKS = "full"


_MEMBERS: Mapping[str, Sequence[Enum]] = {
    "sharded": list(ShardedStates),
    "recompute": list(Recompute),
    "offload": list(HostStates),
}


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degree of each axis, and what is sharded.

    Ranks are ordered with ``tp`` fastest, then ``cp``, ``shard``, ``dp``, and ``pp`` slowest, so
    that the ranks that talk most are neighbours.

    Attributes:
        tp: ranks that share each matrix.
        cp: ranks that share each sequence.
        ep: ranks, of those that share the batch, that share the experts.
        shard: ranks that share what ``sharded`` says.
        dp: replicas of that; ``dp * shard`` ranks have batches of their own.
        pp: stages on so many ranks.
        chunks: stages for each rank.
        microbatch: sequences of one microbatch on one rank of ``dp * shard``.
        microbatches: in one step.
        sharded: what the ranks of ``shard`` keep parts of.
        recompute: what the backward computes again.
        sequence_parallel: whether norms and residuals are shared over ``tp``, too.
        offload: what the host keeps of sharded states.
        schedule: of the pipeline, a name of ``stage_schedule``; None: ``1f1b``, and with more
            chunks ``interleaved``.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    shard: int = 1
    dp: int = 1
    pp: int = 1
    chunks: int = 1
    microbatch: int = 1
    microbatches: int = 1
    sharded: ShardedStates = ShardedStates.NOTHING
    recompute: Recompute = Recompute.NOTHING
    sequence_parallel: bool = False
    schedule: str | None = None
    offload: HostStates = HostStates.NOTHING

    def __post_init__(self) -> None:
        degrees = ("tp", "cp", "ep", "shard", "dp", "pp", "chunks")
        for name in (*degrees, "microbatch", "microbatches"):
            integer(name, getattr(self, name), low=1)
        for name, members in _MEMBERS.items():
            one_of(name, getattr(self, name), members)
        if self.offload is not HostStates.NOTHING and self.sharded is ShardedStates.NOTHING:
            raise ArgumentError(
                f"offload is {self.offload.value!r} and nothing is sharded: the host keeps shards "
                "alone"
            )
        self._check_schedule()
        if (self.dp * self.shard) % self.ep:
            raise ArgumentError(
                f"ep is {self.ep}, which does not divide dp * shard, {self.dp * self.shard}"
            )

    def _check_schedule(self) -> None:
        if self.schedule is None:
            return
        one_of("schedule", self.schedule, list(SCHEDULES))
        allowed = self.schedule_cost.chunks
        if self.chunks not in allowed:
            raise ArgumentError(
                f"chunks is {self.chunks} and schedule {self.schedule!r}, which has "
                f"{' or '.join(map(str, allowed))}"
            )

    @property
    def schedule_name(self) -> str:
        """The name of the schedule, also where none is given.

        Example:
            >>> Layout(pp=4, chunks=2).schedule_name
            'interleaved'
        """
        return self.schedule or ("interleaved" if self.chunks > 1 else "1f1b")

    @property
    def schedule_cost(self) -> ScheduleCost:
        """What is known of the schedule without its actions."""
        return SCHEDULES[self.schedule_name]

    @property
    def has_closed_form(self) -> bool:
        """Whether its bubble is known without a simulation."""
        return self.schedule_cost.bubble is not None

    @property
    def head_rank(self) -> int:
        """The position on ``pp`` that has the last stage."""
        return 0 if self.schedule_cost.is_v else self.pp - 1

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank of ``shard`` reduces and keeps a part of the gradients."""
        return self.shard > 1 and self.sharded in (
            ShardedStates.GRADIENTS,
            ShardedStates.PARAMETERS,
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.tp * self.cp * self.shard * self.dp * self.pp

    @property
    def num_batches(self) -> int:
        """Ranks that have batches of their own."""
        return self.dp * self.shard

    @property
    def global_batch(self) -> int:
        """Sequences of a step.

        Example:
            >>> Layout(dp=2, shard=4, microbatch=2, microbatches=8).global_batch
            128
        """
        return self.num_batches * self.microbatch * self.microbatches
