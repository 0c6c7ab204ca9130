"""What a stage's module has if its gradients are shared with replicas, or its parameters sharded.

``DDP`` and ``FSDP`` fit these protocols and know nothing of pipelines; nothing here knows them.

[Note: who reduces]
Every backward of a microbatch runs under ``no_sync``, whatever the order of microbatches is, and
the REDUCE of the schedule is the only place where gradients of a stage are reduced. Replicas of a
stage work through one list, so their collectives meet in one order, and with no other than theirs.
With ``reduce_every="microbatch"`` there is no REDUCE: each backward reduces while it runs, or at
the end of its second half.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol, final, runtime_checkable

from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.modules.autograd import add_weight_gradient, weight_gradient
from echelon.state.sharded_state import axes_in

ReduceEvery = Literal["step", "microbatch"]


@runtime_checkable
class Replicated(Protocol):
    """A module whose gradients are reduced over ranks that have the same one."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside leave gradients on this rank."""

    def sync_gradients(self, *, may_be_none: bool = False) -> None:
        """Reduce those gradients, which a rank may have none of; all replicas call it."""

    def accumulate_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a whole gradient to those on this rank, as a backward under ``no_sync`` does."""


@runtime_checkable
class Shardable(Replicated, Protocol):
    """A module of whose parameters each rank keeps a part."""

    @property
    def whole_nbytes(self) -> int:
        """Bytes of its parameters when they are whole."""

    def gather_parameters(self) -> None:
        """Begin to make them whole; they stay so until released. All ranks call it."""

    def release_parameters(self) -> None:
        """Give their memory back. Does not communicate."""

    def await_readers(self) -> None:
        """Return when no rank reads the parts of this one any more. All ranks call it."""


def is_torchs(module: nn.Module) -> bool:
    """Whether torch's own wrappers see its gradients, in ways that leave no trace on parameters."""
    home = type(module).__module__
    return home.startswith(("torch.nn.parallel", "torch.distributed"))


def unwrapped(stage: nn.Module) -> nn.Module:
    """The stage that the user has made, without what shares it."""
    return next(one for one in stage.modules() if not isinstance(one, Replicated))


@final
class Sharing:
    """What actions on whole stages, and backwards, mean for one stage's module.

    Args:
        every: whether gradients are reduced once, by the schedule, or in each backward.
    """

    def __init__(self, module: nn.Module, every: ReduceEvery) -> None:
        self._module = module
        self._replica = module if isinstance(module, Replicated) else None
        self._shards = module if isinstance(module, Shardable) else None
        self._often = every == "microbatch"

    @property
    def is_local(self) -> bool:
        """Whether no other rank waits for gradients of this module."""
        return self._replica is None and not any(map(is_torchs, self._module.modules()))

    @property
    def num_ranks(self) -> int:
        """How many share this module, as far as it knows."""
        return prod(axis.size for axis in axes_in(self._module))

    @property
    def nbytes(self) -> int | None:
        """Bytes of the whole parameters; None where they are not sharded."""
        return None if self._shards is None else self._shards.whole_nbytes

    def first_half(self) -> AbstractContextManager[None]:
        """Around a backward whose weight gradients come later."""
        return nullcontext() if self._replica is None else self._replica.no_sync()

    def whole_backward(self) -> AbstractContextManager[None]:
        """Around a backward after which nothing of its microbatch comes."""
        return nullcontext() if self._often else self.first_half()

    def add_product(self, weight: Tensor, x: Tensor, grad: Tensor) -> None:
        """Add the gradient of a linear layer's weight, in the second half of a backward."""
        if self._replica is None:
            add_weight_gradient(weight, x, grad)
        else:
            assert isinstance(weight, nn.Parameter)
            self._replica.accumulate_gradient(weight, weight_gradient(x, grad))

    def end_microbatch(self) -> None:
        """All gradients of a microbatch are there, and no backward has reduced them."""
        if self._often:
            self.reduce()

    def reduce(self) -> None:
        """Reduce the gradients on this rank."""
        if self._replica is not None:
            # What one rank has trained of the stage, such as a branch, another one may have not.
            self._replica.sync_gradients(may_be_none=True)

    def gather(self) -> None:
        """Begin to make the parameters whole."""
        if self._shards is not None:
            self._shards.gather_parameters()

    def release(self) -> None:
        """Keep the own part only."""
        if self._shards is not None:
            self._shards.release_parameters()

    def rest(self) -> None:
        """Return when the parameters may be written."""
        if self._shards is not None:
            self._shards.await_readers()


@final
@dataclass(frozen=True, slots=True)
class Gathering:
    """How ``lower`` treats whole stages; the same on all ranks.

    Attributes:
        nbytes: of the whole parameters of each stage; None if no stage is sharded.
        reduces: whether the schedule does, and not each backward.
        num_ranks: how many share a stage, as far as stages know.
    """

    nbytes: list[int] | None
    reduces: bool
    num_ranks: int

    @classmethod
    def agree(
        cls,
        own: Mapping[int, Sharing],
        group: Group,
        every: ReduceEvery,
        window_nbytes: int | None,
    ) -> Gathering:
        """Ask all ranks of the pipeline about their stages; all call it.

        Raises:
            ArgumentError: an option is for stages that are sharded, or replicated, and none is.
        """
        mine = {
            index: (one.nbytes, one._replica is not None, one.num_ranks)
            for index, one in own.items()
        }
        found: dict[int, tuple[int | None, bool, int]] = {}
        for theirs in group.all_gather_object(mine):
            found.update(theirs)
        sizes = [found[index][0] for index in sorted(found)]
        is_sharded = any(size is not None for size in sizes)
        if window_nbytes is not None and not is_sharded:
            raise ArgumentError(
                f"window_nbytes is {window_nbytes}, but no stage is sharded: wrap stages in "
                "ec.FSDP, or leave it out"
            )
        if every == "microbatch" and not any(replicated for _, replicated, _ in found.values()):
            raise ArgumentError(
                "reduce_every is 'microbatch', but nobody shares gradients with a stage: wrap "
                "stages in ec.FSDP or ec.DDP, or leave it out"
            )
        nbytes = [size or 0 for size in sizes] if is_sharded else None
        num_ranks = max(own for _, _, own in found.values())
        return cls(nbytes, every == "step", num_ranks)
