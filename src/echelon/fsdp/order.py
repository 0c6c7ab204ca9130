"""In which order units are gathered and their gradients leave: the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import final

from echelon.errors import StateError
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.lineup import Lineup, backward_guess, common_order

_FORWARD, _EVALUATION, _LEFT = "forward", "evaluation", "forwards left"
MOST_FORWARDS = 8  # before one backward, of which each is expected to need gathers of its own


@final
class Orders:
    """Guesses at first; then what the ranks have really done, put together.

    A pass that strayed from its order did so on all ranks, or they would not have gathered the same
    units. So all of them note the new one, and agree on it before the next forward.

    Args:
        reducing: units with gradients, the root, unit 0, first.
        moving: units that are gathered with communication, but for the root.
        around: by unit, the units of ``moving`` that it is inside of, from the outermost on.

    Attributes:
        called: units that a forward has come to, in order, whether they were whole or not.
        num_forwards: with a graph, to which no backward may have come; all from ``MOST_FORWARDS``
            on count as so many. What a backward gathers depends on it.
        all_whole: whether every unit that the backward may need is whole since forward, on all
            ranks, so that no gather is expected.
        is_released: whether nothing is whole that a forward has left whole for its backward: all
            units were released since, on all ranks.
        reductions: the order in which gradients leave.
        left_out: units that no rank had to gather for the backward of one forward, though all have
            used them: frozen ones, before all else. Where backward may come to one after all, it
            has to stay whole.
    """

    def __init__(
        self,
        reducing: Sequence[int],
        moving: Sequence[int],
        around: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._moving, self._around = list(moving), around or {}
        self._gathered = self._moving  # in the last forward
        # By whether it makes a graph: what stays whole then is not gathered again.
        self._forwards = {has_graph: Lineup(moving, guess=True) for has_graph in (True, False)}
        self._has_graph = True
        self.called: list[int] = []
        self.num_forwards, self.all_whole, self.is_released = 0, False, False
        self._backwards: dict[str, Lineup] = {}  # by what came before
        self._usual_back: dict[str, list[int]] = {}
        self.left_out: set[int] = set()
        self._several: set[str] = set()  # kinds of backward that do not follow one forward
        self._guessed: set[str] = set()  # those of them whose units vary, and stay a guess
        self._skips = False  # a rank has left units out, of what ``_several`` were seen to need
        self.reductions = list(reversed(reducing))  # the root's gradients come last
        self._noted: dict[str, tuple[list[int], list[int]]] = {}
        self._knows_reductions = False

    @property
    def forward(self) -> Lineup:
        """Gathers of the forward that was begun last, or is next."""
        return self._forwards[self._has_graph]

    def begin_forward(self, has_graph: bool) -> None:
        """A forward begins."""
        self.is_released, self._has_graph = False, has_graph
        self.forward.begin()
        self.called = []

    def note_forward(self) -> None:
        """A forward is over."""
        self._gathered = self.forward.taken
        if not self.forward.is_right:
            kind = _FORWARD if self._has_graph else _EVALUATION
            self._noted[kind] = self.forward.real, self.called

    def begin_backward(self, ranks: HybridGroups, skips: bool) -> None:
        """A backward begins.

        Each of several forwards may use other units, and so one backward may come to a unit early
        and the next one late. What was seen is the order where all forwards use all units alone.

        Args:
            skips: whether a forward of this rank, whose backward may come, has left units out.
        """
        self._skips = False
        if self._kind in self._several and not self.backward.is_guess:
            self._skips = any(ranks.all_gather_object(skips))
        self.backward.begin()

    @property
    def backward(self) -> Lineup:
        """Gathers of the backward that was begun last, or is next."""
        if self._kind not in self._backwards:
            if not self.all_whole and (self.num_forwards != 1 or self.is_released):
                self._several.add(self._kind)
            # Backward runs through the last forward first.
            times = 0 if self.all_whole else self.num_forwards or 1
            usual = backward_guess(self._gathered, self._around) * times
            self._usual_back[self._kind] = usual
            self._backwards[self._kind] = Lineup(usual, guess=True)
        return self._backwards[self._kind]

    @property
    def _kind(self) -> str:
        if self.all_whole:
            return "all whole"
        released = ", released" if self.is_released else ""
        skips = ", some skipped" if self._skips else ""
        return f"after {self.num_forwards} forwards{released}{skips}"

    def note_backward(self, used: Collection[int]) -> None:
        """A backward is over, after forwards that all have ``used`` these units."""
        if not self.backward.is_right and self._kind not in self._guessed:
            self._noted[self._kind] = self.backward.real, sorted(used)

    def note_left(self, num_awaited: int) -> None:
        """A backward is over, and may have come to some of the forwards before it only.

        Ranks may differ in what they know of this, so until they have agreed, all but one count.

        Args:
            num_awaited: forwards to which no backward has come on this rank, and yet may.
        """
        if self._moving and (self.num_forwards > 1 or _LEFT in self._noted):
            self._noted[_LEFT] = [num_awaited], []
        self.num_forwards = max(self.num_forwards - 1, 0)

    def note_reductions(self, completed: Sequence[int]) -> None:
        """The gradients of a backward were complete in this order."""
        if not self._knows_reductions:
            self._knows_reductions = True
            self._noted["reductions"] = list(completed), []

    def agree(self, ranks: HybridGroups) -> None:
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
            if kind == _LEFT:
                self.num_forwards = min(max(max(left) for left in orders), MOST_FORWARDS)
            elif kind == "reductions":
                self.reductions = common_order(orders, self.reductions)
            elif kind in (_FORWARD, _EVALUATION):
                order = common_order(orders, self._moving)
                self._forwards[kind == _FORWARD] = Lineup(order)
                if self._forwards[False].is_guess:  # where nothing stays whole
                    calls = [noted[kind][1] for noted in everyone]
                    self._forwards[False] = Lineup(common_order(calls, self._moving))
            else:
                # Used by every forward of every rank and not gathered for backward: whole since
                # forward, or frozen and before all else.
                used = set.intersection(*(set(noted[kind][1]) for noted in everyone))
                if kind in self._several and not used.issuperset(self._moving):
                    self._guessed.add(kind)
                    continue
                order = common_order(orders, self._usual_back[kind], without=used)
                self._backwards[kind] = Lineup(order)
                if kind not in self._several:
                    self.left_out = set(self._moving).difference(order)
