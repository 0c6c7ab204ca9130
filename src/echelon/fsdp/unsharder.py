"""The one place that unshards units in passes: when a pass reaches them, or before.

Where an unshard communicates, all ranks take part in all of them, in the order that
``execution_order`` expects. A unit that this rank does not use is resharded when it has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import final

import torch

from echelon.fsdp.execution_order import ExecutionOrder, PassOrder
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.pass_state import ForwardRun
from echelon.fsdp.policy import BackwardPrefetch, FSDPOptions
from echelon.fsdp.storage import refresh, wait_for_unshards
from echelon.fsdp.unit import SHARDED, UNSHARDED, UNSHARDING, Unit

MAX_PREFETCHED = 2  # units that are unsharded before they are needed, where that is limited


@final
class Unsharder:
    """Unshards units when passes reach them, and takes part in what other ranks need.

    Args:
        units: the root first. It is unsharded when a pass begins, on all ranks alike.
        groups: the ranks that share them.
        options: how many units may be unsharded before they are needed.

    Attributes:
        order: what all ranks expect.
        keeps_unsharded: whether all units stay unsharded, so that passes unshard nothing.
    """

    def __init__(self, units: Sequence[Unit], groups: HybridGroups, options: FSDPOptions) -> None:
        self._units, self._groups = units, groups
        self._storages = [storage for unit in units for storage in unit.storages]
        self._reshards = options.traits.reshards_after_forward
        limit = MAX_PREFETCHED if options.limit_all_gathers else len(units)
        self._forward_prefetch = min(options.forward_prefetch, limit)
        self._backward_prefetch = options.backward_prefetch
        self._communicating = [u for u, unit in enumerate(units) if u and unit.communicates]
        reducing = [u for u, unit in enumerate(units) if unit.gradient_shards]
        ancestors = _ancestors(units, self._communicating)
        self.order = ExecutionOrder(reducing, self._communicating, ancestors)
        self.keeps_unsharded = False
        self._prefetched: deque[int] = deque()  # in the order of their unshards
        self._done: set[int] = set()  # units that had their unshard in this backward, and left
        self._early: set[int] = set()  # units unsharded before this backward has reached them
        self._may_reach: Callable[[int], bool] = lambda u: False
        self._launch_reductions: Callable[[], None] = lambda: None

    # Across passes ---------------------------------------------------------------------------

    def unshard_all(self) -> None:
        """Begin to unshard all units, in their order; they stay so until ``reshard_all``."""
        self.keeps_unsharded = True
        for unit in self._units:
            unit.stays_unsharded = True
            unit.prefetch()

    def reshard_all(self) -> None:
        """Reshard all units."""
        self.keeps_unsharded = False
        for unit in self._units:
            unit.stays_unsharded = False
            unit.reshard()

    def reshard_between_passes(self) -> None:
        """Reshard all units, outside of passes and on all ranks; a backward unshards them again."""
        self._drop_prefetched()
        self.reshard_all()
        self.order.all_unsharded, self.order.is_resharded = False, True

    def publish_shards(self, what: str) -> None:
        """Make the shards ready, and meet: from now on an unshard gives what all ranks have now."""
        refresh(self._storages)
        self._groups.barrier_if_shared(what)

    def wait_for_readers(self, what: str) -> None:
        """Return when nobody reads the shards any more, so that they may be written."""
        wait_for_unshards(self._storages)
        self._groups.barrier_if_shared(what)

    # In passes -------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """An outermost forward begins."""
        self._drop_prefetched()
        self.order.agree(self._groups)
        self.order.begin_forward(torch.is_grad_enabled())
        self.publish_shards("parameters are ready")

    def end_forward(self) -> None:
        """An outermost forward is over."""
        if not self.keeps_unsharded:
            self._unshard_rest(self.order.forward)
            self.order.end_forward(torch.is_grad_enabled(), not self._reshards)

    def begin_backward(
        self,
        runs: Iterable[ForwardRun],
        may_reach: Callable[[int], bool],
        launch_reductions: Callable[[], None],
    ) -> None:
        """A backward begins.

        Args:
            runs: forwards whose backward may come.
            may_reach: whether it may still come to a unit on this rank.
            launch_reductions: called when this rank has taken part in the unshard of a unit that it
                does not use: others may wait for its gradients.
        """
        if self.keeps_unsharded:
            return
        self._drop_prefetched()
        if self.order.is_resharded:
            self.publish_shards("parameters are ready for a backward")
        self._done.clear()
        self._early.clear()
        self._may_reach, self._launch_reductions = may_reach, launch_reductions
        skips = not all(run.units.issuperset(self._communicating) for run in runs)
        self.order.begin_backward(self._groups, skips)
        self._units[0].unshard()  # if an earlier backward has resharded it: first, on every rank

    def end_backward(self, used: Collection[int], num_awaited: int) -> None:
        """A backward is over; see ``ExecutionOrder.end_backward``."""
        if not self.keeps_unsharded:
            self._unshard_rest(self.order.backward)
            self.order.end_backward(used, num_awaited)

    def unshard(self, u: int, order: PassOrder) -> None:
        """A pass with this order has reached a unit: unshard it."""
        unit = self._units[u]
        if u and unit.communicates and unit.state is not UNSHARDED and not self.keeps_unsharded:
            if order is self.order.forward:
                self.order.called.append(u)
            for v in self._come_before(u, unit, order):
                self._skip(v, order)
        unit.unshard()

    def _come_before(self, u: int, unit: Unit, order: PassOrder) -> Sequence[int]:
        """The units whose unshards come before that of ``u``, and which this rank did not reach."""
        if unit.state is UNSHARDING:  # prefetched
            order.reach_prefetched(u)
            skipped = []
            while (v := self._prefetched.popleft()) != u:
                skipped.append(v)
            return skipped
        if unit.state is SHARDED:
            skipped = order.reach(u)
            if not order.strayed:
                skipped = [*self._prefetched, *skipped]
                self._prefetched.clear()
            return skipped
        if u in self._early:
            self._early.remove(u)
            order.reach_prefetched(u)
            return ()
        if not self._reshards:
            # It has stayed unsharded since forward, where another rank may not have used it.
            for v in order.reach_unsharded(u):
                self._unshard_for_others(v, order)
        return ()

    def prefetch_in_forward(self) -> None:
        """Forward has reached a unit: begin with those that come next."""
        self._prefetch(self.order.forward, self._forward_prefetch)

    def prefetch_before_gradients(self) -> None:
        """Backward begins with a unit, which is unsharded."""
        if self._backward_prefetch is BackwardPrefetch.PRE:
            self._prefetch(self.order.backward, 1)

    def prefetch_after_gradients(self) -> None:
        """All gradients of a unit are there, and it was resharded."""
        if self._backward_prefetch is BackwardPrefetch.POST:
            self._prefetch(self.order.backward, 1)

    def _prefetch(self, order: PassOrder, depth: int) -> None:
        """Begin the unshards that are expected next, until ``depth`` are prefetched."""
        while len(self._prefetched) < depth and not self.keeps_unsharded:
            u = order.peek()
            if u is None or self._units[u].state is not SHARDED:
                return
            order.take_next()
            self._units[u].prefetch()
            self._prefetched.append(u)

    def is_done(self, u: int) -> bool:
        """Whether a unit that no forward has used has had its unshard in this backward."""
        if self.keeps_unsharded:
            return False  # no unshard tells
        return self._units[u].communicates and (u in self._done or self.order.all_unsharded)

    # Units that this rank does not use, or not yet -------------------------------------------

    def _skip(self, u: int, order: PassOrder) -> None:
        """Take part in an unshard whose turn comes before this rank has reached the unit.

        Other ranks take part in it once. So if backward comes to the unit later, because its order
        is another one here, as in a checkpoint that runs forward again, it must be unsharded then.
        """
        unit = self._units[u]
        in_forward = order is self.order.forward
        if not in_forward and not unit.has_unsharded and self._may_reach(u):
            unit.unshard()
            unit.hide()
            self._early.add(u)
        elif unit.state is UNSHARDING:
            self._drop(u)
        else:
            self._unshard_for_others(u, order)
            return
        if not in_forward:
            self._launch_reductions()

    def _unshard_rest(self, order: PassOrder) -> None:
        """Take part in the unshards that are left at the end of a pass."""
        self._drop_prefetched()
        for u in order.take_rest():
            self._unshard_for_others(u, order)

    def _unshard_for_others(self, u: int, order: PassOrder) -> None:
        self._units[u].unshard_for_others()
        self._done.add(u)
        if order is not self.order.forward:
            self._launch_reductions()

    def _drop(self, u: int) -> None:
        """Reshard a unit that was prefetched, and that this rank does not use."""
        self._units[u].reshard()
        self._done.add(u)

    def _drop_prefetched(self) -> None:
        while self._prefetched:
            self._drop(self._prefetched.popleft())


def _ancestors(units: Sequence[Unit], among: Collection[int]) -> dict[int, list[int]]:
    """By unit, those of ``among`` whose modules its own is inside of, from the outermost on."""
    return {u: [v for v in among if units[u].name.startswith(f"{units[v].name}.")] for u in among}
