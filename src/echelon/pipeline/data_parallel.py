"""Data parallelism of one stage: what UNSHARD, RESHARD, REDUCE and backwards do to its module.

``DDP`` and ``FSDP`` implement these protocols; neither they nor this file import the other.

[Note: who reduces]
Every backward of a microbatch runs under ``no_sync``, in any order of microbatches, and only the
REDUCE of the schedule reduces the gradients of a stage. Replicas of a stage run the same list of
actions, so they call their collectives in the same order. With ``reduce_every="microbatch"`` there
is no REDUCE: each backward reduces while it runs, or at the end of its second half.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, Protocol, final, runtime_checkable

from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.modules.autograd import add_weight_gradient, weight_gradient
from echelon.state.sharded_state import axes_in

ReduceEvery = Literal["step", "microbatch"]


@runtime_checkable
class Replicated(Protocol):
    """A module whose gradients are reduced over the ranks that have replicas of it."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in the block leave gradients unreduced."""

    def sync_gradients(self, *, may_be_none: bool = False) -> None:
        """Reduce the gradients on this rank, which may have none. All replicas call it."""

    def accumulate_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a full gradient to those on this rank, as a backward under ``no_sync`` does."""


@runtime_checkable
class Shardable(Replicated, Protocol):
    """A module whose parameters are sharded over ranks."""

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the unsharded parameters."""

    def gather_parameters(self) -> None:
        """Begin to unshard the parameters until they are released. All ranks call it."""

    def release_parameters(self) -> None:
        """Free the unsharded parameters. Does not communicate."""

    def await_readers(self) -> None:
        """Wait until no other rank reads the shards of this one. All ranks call it."""


def is_torch_wrapper(module: nn.Module) -> bool:
    """Whether a module is a wrapper of torch, which gets gradients without hooks on parameters."""
    home = type(module).__module__
    return home.startswith(("torch.nn.parallel", "torch.distributed"))


def unwrap(stage: nn.Module) -> nn.Module:
    """The module that the user made, inside of ``DDP`` and ``FSDP``."""
    return next(module for module in stage.modules() if not isinstance(module, Replicated))


@final
class StageDataParallel:
    """What whole-stage actions and backwards do to a stage's module; nothing if it is plain.

    Attributes:
        is_torch: whether a wrapper of torch is in this module.
        is_local: whether no other rank waits for gradients of this module.
    """

    def __init__(self, module: nn.Module, reduce_every: ReduceEvery) -> None:
        self._module = module
        self._replicated = module if isinstance(module, Replicated) else None
        self._sharded = module if isinstance(module, Shardable) else None
        self._reduces_each_microbatch = reduce_every == "microbatch"
        self.is_torch = any(map(is_torch_wrapper, module.modules()))
        self.is_local = not self.is_replicated and not self.is_torch

    @property
    def is_replicated(self) -> bool:
        """Whether gradients are reduced over replicas of this module."""
        return self._replicated is not None

    @property
    def num_ranks(self) -> int:
        """How many ranks have replicas or shards of this module, by the groups of its wrappers."""
        return prod(axis.size for axis in axes_in(self._module))

    @property
    def unsharded_nbytes(self) -> int | None:
        """Bytes of the unsharded parameters; None if they are not sharded."""
        return None if self._sharded is None else self._sharded.whole_nbytes

    def during_backward_input(self) -> AbstractContextManager[None]:
        """Around a backward whose weight gradients come later."""
        return nullcontext() if self._replicated is None else self._replicated.no_sync()

    def during_backward(self) -> AbstractContextManager[None]:
        """Around a full backward, the last of its microbatch."""
        return nullcontext() if self._reduces_each_microbatch else self.during_backward_input()

    def add_weight_gradient(self, weight: Tensor, x: Tensor, grad: Tensor) -> None:
        """Add the gradient of a linear layer's weight, in the second half of a backward."""
        if self._replicated is None:
            add_weight_gradient(weight, x, grad)
        else:
            assert isinstance(weight, nn.Parameter)
            self._replicated.accumulate_gradient(weight, weight_gradient(x, grad))

    def end_microbatch(self) -> None:
        """Reduce the gradients of a microbatch that no backward has reduced, if each is reduced."""
        if self._reduces_each_microbatch:
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """REDUCE: reduce the gradients on this rank."""
        if self._replicated is not None:
            # One rank may have trained a branch of the stage that another one has not.
            self._replicated.sync_gradients(may_be_none=True)

    def unshard(self) -> None:
        """UNSHARD: begin to unshard the parameters."""
        if self._sharded is not None:
            self._sharded.gather_parameters()

    def reshard(self) -> None:
        """RESHARD: keep only the shard of this rank."""
        if self._sharded is not None:
            self._sharded.release_parameters()

    def wait_for_readers(self) -> None:
        """Wait until the parameters may be written."""
        if self._sharded is not None:
            self._sharded.await_readers()


class _StageFacts(NamedTuple):
    """What the rank of a stage tells the others."""

    unsharded_nbytes: int | None
    is_replicated: bool
    num_ranks: int


@final
@dataclass(frozen=True, slots=True)
class StageCollectives:
    """Which whole-stage actions ``lower`` adds; the same on all ranks.

    Attributes:
        unsharded_nbytes: of the unsharded parameters of each stage; None if no stage is sharded.
        has_reductions: whether the schedule reduces gradients, and not each backward.
        num_ranks: the largest number of ranks that have replicas or shards of one stage.
    """

    unsharded_nbytes: list[int] | None
    has_reductions: bool
    num_ranks: int

    @classmethod
    def agree(
        cls,
        stages: Mapping[int, StageDataParallel],
        group: Group,
        reduce_every: ReduceEvery,
        window_nbytes: int | None,
    ) -> StageCollectives:
        """Exchange the facts of all stages. All ranks of the pipeline call it."""
        local = {
            index: _StageFacts(stage.unsharded_nbytes, stage.is_replicated, stage.num_ranks)
            for index, stage in stages.items()
        }
        by_stage: dict[int, _StageFacts] = {}
        for stages_of_rank in group.all_gather_object({i: tuple(f) for i, f in local.items()}):
            by_stage |= {index: _StageFacts(*facts) for index, facts in stages_of_rank.items()}
        sizes = [by_stage[index].unsharded_nbytes for index in sorted(by_stage)]
        is_sharded = any(size is not None for size in sizes)
        if window_nbytes is not None and not is_sharded:
            raise ArgumentError(
                f"window_nbytes is {window_nbytes}, but no stage is sharded: wrap stages in "
                "ec.FSDP, or leave it out"
            )
        is_replicated = any(facts.is_replicated for facts in by_stage.values())
        if reduce_every == "microbatch" and not is_replicated:
            raise ArgumentError(
                "reduce_every is 'microbatch', but nobody shares gradients with a stage: wrap "
                "stages in ec.FSDP or ec.DDP, or leave it out"
            )
        return cls(
            unsharded_nbytes=[size or 0 for size in sizes] if is_sharded else None,
            has_reductions=reduce_every == "step",
            num_ranks=max(facts.num_ranks for facts in by_stage.values()),
        )
