"""In which order units are gathered and their gradients leave: the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from echelon.errors import StateError
from echelon.fsdp.lineup import Lineup, common_order
from echelon.fsdp.ranks import Ranks

__all__ = ["Orders"]


@final
class Orders:
    """Guesses at first; then what the ranks have really done, put together.

    A pass that strayed from its order did so on all ranks, or they would not have gathered the same
    units. So all of them note the new one, and agree on it before the next forward.

    Args:
        reducing: units with gradients, the root, unit 0, first.
        moving: units that are gathered with communication, but for the root.
        regathers: whether backward gathers them again.

    Attributes:
        forward: gathers of a forward.
        backward: gathers of a backward.
        reductions: the order in which gradients leave.
    """

    def __init__(self, reducing: Sequence[int], moving: Sequence[int], *, regathers: bool) -> None:
        self._moving = list(moving)
        self._usual_back = list(reversed(moving)) if regathers else []
        self.forward = Lineup(self._moving, guess=True)
        self.backward = Lineup(self._usual_back, guess=True)
        self.reductions = list(reversed(reducing))  # the root's gradients come last
        self._noted: dict[str, tuple[list[int], list[int]]] = {}
        self._knows_reductions = False

    def note_forward(self) -> None:
        """A forward is over."""
        if not self.forward.is_right:
            self._noted["forward"] = self.forward.real, []

    def note_backward(self, used: Collection[int]) -> None:
        """A backward is over, after forwards that have ``used`` these units."""
        if not self.backward.is_right:
            self._noted["backward"] = self.backward.real, sorted(used)

    def note_reductions(self, completed: Sequence[int]) -> None:
        """The gradients of a backward were complete in this order."""
        if not self._knows_reductions:
            self._knows_reductions = True
            self._noted["reductions"] = list(completed), []

    def agree(self, ranks: Ranks) -> None:
        """Before a forward: make what was noted the order of all ranks."""
        if not self._noted:
            return
        everyone: list[dict[str, tuple[list[int], list[int]]]]
        everyone = ranks.all_gather_object(self._noted)
        self._noted = {}
        if len({tuple(noted) for noted in everyone}) > 1:
            raise StateError(
                "some ranks have run their units in another order than before and some have not, "
                "so they have exchanged parameters of different units: run units in one order on "
                "all ranks; a rank may leave units out"
            )
        for kind in everyone[0]:
            orders = [noted[kind][0] for noted in everyone]
            if kind == "reductions":
                self.reductions = common_order(orders, self.reductions)
            elif kind == "forward":
                self.forward = Lineup(common_order(orders, self._moving))
            else:
                # Used by a forward and not gathered for its backward: frozen, and before all else.
                used = {u for noted in everyone for u in noted[kind][1]}
                self.backward = Lineup(common_order(orders, self._usual_back, without=used))
