"""Gathers of the units of a model, in one order on all ranks, and early where that is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import final

import torch

from echelon.fsdp.backward_pass import Run
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.lineup import Lineup
from echelon.fsdp.order import MOST_FORWARDS, Orders
from echelon.fsdp.policy import FSDPOptions
from echelon.fsdp.prefetch import BackwardPrefetch
from echelon.fsdp.unit import Unit

MOST = 2  # units ahead of need, where gathers are limited


def _nothing() -> None:
    """Forward has no gradients to send."""


@final
class Gathers:
    """Makes units whole when passes reach them, and takes part in what other ranks need.

    Args:
        units: the root first. It is gathered when a pass begins, on all ranks alike.
        options: how many units may be whole before they are needed.

    Attributes:
        orders: what all ranks expect.
    """

    def __init__(self, units: Sequence[Unit], options: FSDPOptions) -> None:
        self._units, self._options = units, options
        self._moving = moving = [u for u, unit in enumerate(units) if u and unit.moves]
        reducing = [u for u, unit in enumerate(units) if unit.shards]
        self.orders = Orders(reducing, moving, _around(units, moving))
        self._early: deque[int] = deque()  # gathers that have begun ahead, in order
        self._passed: set[int] = set()  # units whose gathers in this backward are behind us
        self._may_reach: Callable[[int], bool] = lambda u: False  # backward, that runs
        self._kept: set[int] = set()  # units whose gathers came before backward has reached them
        self.holds = False  # all units stay whole, so that passes gather nothing

    # Across passes ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Begin to gather all units, in their order; they stay whole until ``let_go``."""
        self.holds = True
        for unit in self._units:
            unit.stays = True
            unit.prefetch()

    def let_go(self) -> None:
        """Release all units."""
        self.holds = False
        for unit in self._units:
            unit.stays = False
            unit.release()

    def release(self) -> None:
        """Release all units, outside of passes and on all ranks: their parts may be written."""
        self._drop_early()
        self.let_go()
        self.orders.all_whole, self.orders.is_released = False, True

    # Forward ---------------------------------------------------------------------------------

    def begin_forward(self, ranks: HybridGroups) -> None:
        """An outermost forward begins."""
        self._drop_early()
        self.orders.agree(ranks)
        self.orders.begin_forward(torch.is_grad_enabled())

    def in_forward(self, u: int) -> None:
        """Forward has reached a unit: make it whole."""
        if u and self._units[u].moves and not self._units[u].gathered:
            self.orders.called.append(u)
        self._gather(u, self.orders.forward)
        self._begin(self.orders.forward, self._options.forward_prefetch)

    def end_forward(self) -> None:
        """An outermost forward is over."""
        if self.holds:
            return
        self._join_rest(self.orders.forward)
        self.orders.note_forward()
        # A forward begins with all units released, so what an older graph needs is not whole now.
        has_graph, orders = torch.is_grad_enabled(), self.orders
        stays = has_graph and not self._options.strategy.regathers
        orders.all_whole = stays and not orders.num_forwards
        orders.is_released = not has_graph
        orders.num_forwards = min(orders.num_forwards + has_graph, MOST_FORWARDS)

    # Backward --------------------------------------------------------------------------------

    def begin_backward(
        self,
        ranks: HybridGroups,
        runs: Iterable[Run],
        may_reach: Callable[[int], bool],
        make_ready: Callable[[], None],
    ) -> None:
        """A backward begins.

        Args:
            runs: forwards whose backward may come.
            may_reach: whether it may still come to a unit on this rank.
            make_ready: makes the parts of all ranks valid where they may have been written since
                forward; all ranks call it.
        """
        if self.holds:
            return
        self._drop_early()
        if self.orders.is_released:
            make_ready()
        self._passed.clear()
        self._kept.clear()
        self._may_reach = may_reach
        skips = not all(run.units.issuperset(self._moving) for run in runs)
        self.orders.begin_backward(ranks, skips)
        self._units[0].gather()  # if an earlier backward has released it: first, on every rank

    def in_backward(self, u: int, passed: Callable[[], None]) -> None:
        """Backward needs a unit: make it whole.

        Args:
            passed: called when this rank has taken part in the gather of a unit it does not use.
        """
        self._gather(u, self.orders.backward, passed)

    def opened(self, u: int) -> None:
        """Backward begins with a unit, which is whole."""
        if self._options.backward_prefetch is BackwardPrefetch.PRE:
            self._begin(self.orders.backward, 1)

    def complete(self, u: int) -> None:
        """All gradients of a unit are there, and it was released."""
        if self._options.backward_prefetch is BackwardPrefetch.POST:
            self._begin(self.orders.backward, 1)

    def left_out(self, u: int) -> bool:
        """Whether a unit that no forward has used has had its turn in this backward."""
        if self.holds:
            return False  # no gather tells
        return self._units[u].moves and (u in self._passed or self.orders.all_whole)

    def end_backward(
        self, used: Collection[int], passed: Callable[[], None], num_awaited: int
    ) -> None:
        """Backward is over; ``passed`` as in ``in_backward``.

        Args:
            used: units of every forward whose backward may have come.
            num_awaited: forwards that no backward has come to, as far as this rank knows.
        """
        if self.holds:
            return
        self._join_rest(self.orders.backward, passed)
        self.orders.note_backward(used)
        self.orders.note_left(num_awaited)
        self.orders.all_whole = self.orders.is_released = False

    # Both ------------------------------------------------------------------------------------

    def _gather(self, u: int, lineup: Lineup, passed: Callable[[], None] = _nothing) -> None:
        unit = self._units[u]
        if u and unit.moves and not unit.gathered and not self.holds:
            if unit.held and u in self._kept:
                self._kept.remove(u)
                lineup.arrived(u)
            elif unit.held:
                # Whole by choice since forward: another rank may not have used it there.
                for v in [] if self._options.strategy.regathers else lineup.passed(u):
                    self._join(v)
                    passed()
            elif unit.coming:
                lineup.arrived(u)
                while (v := self._early.popleft()) != u:
                    self._pass_by(v, lineup)
                    passed()
            else:
                before = lineup.reached(u)
                while self._early and not lineup.strayed:
                    self._pass_by(self._early.popleft(), lineup)
                for v in before:
                    self._pass_by(v, lineup)
                    passed()
        unit.gather()

    def _begin(self, lineup: Lineup, depth: int) -> None:
        """Begin gathers of the units that come next."""
        if self.holds:
            return
        most = min(depth, MOST) if self._options.limit_all_gathers else depth
        while len(self._early) < most:
            u = lineup.next()
            if u is None or self._units[u].held or self._units[u].coming:
                return
            lineup.advance()
            self._units[u].prefetch()
            self._early.append(u)

    def _leave(self, u: int) -> None:
        """Give a unit back that was gathered ahead, and that this rank does not use."""
        self._units[u].release()
        self._passed.add(u)

    def _drop_early(self) -> None:
        while self._early:
            self._leave(self._early.popleft())

    def _join(self, u: int) -> None:
        self._units[u].join()
        self._passed.add(u)

    def _pass_by(self, u: int, lineup: Lineup) -> None:
        """Take part in a gather whose turn comes before this rank has reached the unit.

        Other ranks take part in it once. So if backward comes to the unit later, because its order
        is another one here, as in a checkpoint that runs forward again, it has to be whole then.
        """
        unit = self._units[u]
        is_late = lineup is not self.orders.forward and not unit.held and self._may_reach(u)
        if is_late:
            unit.gather()
            unit.hide()
            self._kept.add(u)
        elif unit.coming:
            self._leave(u)
        else:
            self._join(u)

    def _join_rest(self, lineup: Lineup, passed: Callable[[], None] = _nothing) -> None:
        self._drop_early()
        for u in lineup.rest():
            self._join(u)
            passed()


def _around(units: Sequence[Unit], moving: Collection[int]) -> dict[int, list[int]]:
    """By unit, those of ``moving`` whose modules its own is inside of, from the outermost on."""
    return {u: [v for v in moving if units[u].name.startswith(f"{units[v].name}.")] for u in moving}
