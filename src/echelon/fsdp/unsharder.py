"""Unshards units when a pass reaches them, or before. The root is unsharded by the forward of the
model itself, and again after a backward inside of this forward.

Where an unshard communicates, all ranks take part in all of them, in the order that
``execution_order`` expects. A unit that this rank does not use is resharded at once.
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
    """Unshards units when passes reach them, and takes part in the unshards of other ranks.

    The root is unsharded when a pass begins, on all ranks alike.

    Attributes:
        order: the order of unshards and reductions that all ranks expect.
        keeps_unsharded: whether all units stay unsharded, so that passes unshard nothing.
        has_readers: whether other ranks may read this rank's shards in a pass that it has left.
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
        self.keeps_unsharded = self.has_readers = False
        self._prefetched: deque[int] = deque()  # in the order of their unshards
        # Units of this backward: those in whose unshards this rank took part only for other ranks,
        # and those unsharded before the backward has reached them.
        self._done_for_others: set[int] = set()
        self._unsharded_early: set[int] = set()
        self._may_reach: Callable[[int], bool] = lambda u: False
        self._launch_reductions: Callable[[], None] = lambda: None

    # Across passes ---------------------------------------------------------------------------

    def unshard_all(self) -> None:
        """Begin to unshard all units; they stay so, over many passes, until ``reshard_all``."""
        self.reshard_all()
        self.begin_forward()
        self.keeps_unsharded = True
        for unit in self._units:
            unit.kept_between_passes = True
            unit.prefetch()

    def reshard_all(self) -> None:
        """Reshard all units. Does not communicate."""
        self.keeps_unsharded = False
        for unit in self._units:
            unit.kept_between_passes = False
            unit.reshard()

    def reshard_between_passes(self) -> None:
        """Reshard all units, outside of passes; a backward that comes unshards them again.

        All ranks call it. It does not communicate.
        """
        self._drop_prefetched()
        self.reshard_all()
        self.order.all_unsharded, self.order.is_resharded = False, True

    def publish_shards(self, what: str) -> None:
        """Make the shards ready and meet, so that an unshard gives what all ranks have now."""
        refresh(self._storages)
        self._groups.barrier_if_shared(what)

    def wait_for_readers(self, what: str) -> None:
        """Return when no rank reads the shards any more, so that they may be written."""
        wait_for_unshards(self._storages)
        self._groups.barrier_if_shared(what)
        self.has_readers = False

    def note_reduced(self, *, in_forward: bool) -> None:
        """Note that all ranks have reduced: none reads shards, unless this one is in a forward."""
        self.has_readers = in_forward

    # In passes -------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """An outermost forward begins."""
        self.has_readers = True
        self._drop_prefetched()
        self.order.agree(self._groups)
        self.order.begin_forward(torch.is_grad_enabled())
        self.publish_shards("parameters are ready (where a rank has no batch, use model.join())")

    def end_forward(self) -> None:
        """An outermost forward is over."""
        if not self.keeps_unsharded:
            self._unshard_rest(self.order.forward)
            self.order.end_forward(stays_unsharded=not self._reshards)

    def begin_backward(
        self,
        runs: Iterable[ForwardRun],
        may_reach: Callable[[int], bool],
        launch_reductions: Callable[[], None],
    ) -> None:
        """A backward begins; ``runs`` are the forwards whose backward may come.

        ``may_reach`` tells whether it may still reach a unit on this rank. ``launch_reductions`` is
        called when this rank has taken part in the unshard of a unit that it does not use, because
        other ranks may wait for its gradients.
        """
        if self.keeps_unsharded:
            return
        self._drop_prefetched()
        if self.order.is_resharded:
            self.publish_shards("parameters are ready for a backward")
        self._done_for_others.clear()
        self._unsharded_early.clear()
        self._may_reach, self._launch_reductions = may_reach, launch_reductions
        skips = not all(run.units.issuperset(self._communicating) for run in runs)
        self.order.begin_backward(self._groups, skips)
        self._units[0].unshard()  # an earlier backward may have resharded it

    def end_backward(self, used: Collection[int], num_forwards: int) -> None:
        """A backward is over; see ``ExecutionOrder.end_backward``."""
        if not self.keeps_unsharded:
            self._unshard_rest(self.order.backward)
            self.order.end_backward(used, num_forwards)

    def unshard(self, u: int, order: PassOrder) -> None:
        """Unshard a unit that the pass with this order has reached."""
        unit = self._units[u]
        if u and unit.communicates and unit.state is not UNSHARDED and not self.keeps_unsharded:
            if order is self.order.forward:
                self.order.called.append(u)
            for v in self._take_unreached_before(u, unit, order):
                self._join_unreached(v, order)
        unit.unshard()

    def _take_unreached_before(self, u: int, unit: Unit, order: PassOrder) -> Sequence[int]:
        """The units whose unshards come before that of ``u`` and which this rank did not reach."""
        if unit.state is UNSHARDING:  # it was prefetched
            order.note_reached(u)
            unreached = []
            while (v := self._prefetched.popleft()) != u:
                unreached.append(v)
            return unreached
        if unit.state is SHARDED:
            unreached = order.reach(u)
            if not order.deviated:
                unreached = [*self._prefetched, *unreached]
                self._prefetched.clear()
            return unreached
        if u in self._unsharded_early:
            self._unsharded_early.remove(u)
            order.note_reached(u)
            return ()
        if not self._reshards:
            # It has stayed unsharded since forward, in which another rank may not have used it.
            for v in order.reach_unsharded(u):
                self._unshard_for_others(v, order)
        return ()

    def prefetch_in_forward(self) -> None:
        """Begin the unshards that come next, after forward has reached a unit."""
        self._prefetch(self.order.forward, self._forward_prefetch)

    def prefetch_before_gradients(self) -> None:
        """With ``PRE``, begin the next unshard when backward begins with an unsharded unit."""
        if self._backward_prefetch is BackwardPrefetch.PRE:
            self._prefetch(self.order.backward, 1)

    def prefetch_after_gradients(self) -> None:
        """With ``POST``, begin the next unshard when a unit has its gradients and is resharded."""
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
        """Whether this rank has taken part in the unshard of an unused unit in this backward."""
        if self.keeps_unsharded:
            return False  # there are no unshards
        return self._units[u].communicates and (
            u in self._done_for_others or self.order.all_unsharded
        )

    # Units that this rank does not use, or does not use yet -----------------------------------

    def _join_unreached(self, u: int, order: PassOrder) -> None:
        """Take part in the unshard of a unit that this rank has not reached.

        The other ranks take part only once. Backward may reach the unit later on this rank, in
        another order, as in a checkpoint that runs forward again; so it stays unsharded then.
        """
        unit = self._units[u]
        in_forward = order is self.order.forward
        if not in_forward and not unit.has_unsharded and self._may_reach(u):
            unit.unshard()
            unit.hide()
            self._unsharded_early.add(u)
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
        self._done_for_others.add(u)
        if order is not self.order.forward:
            self._launch_reductions()

    def _drop(self, u: int) -> None:
        """Reshard a unit that was prefetched and that this rank does not use."""
        self._units[u].reshard()
        self._done_for_others.add(u)

    def _drop_prefetched(self) -> None:
        while self._prefetched:
            self._drop(self._prefetched.popleft())


def _ancestors(units: Sequence[Unit], among: Collection[int]) -> dict[int, list[int]]:
    """By unit, the units of ``among`` whose modules contain its module, the outermost first."""
    return {u: [v for v in among if units[u].name.startswith(f"{units[v].name}.")] for u in among}
