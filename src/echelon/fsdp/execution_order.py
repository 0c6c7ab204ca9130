"""In which order units are unsharded and their gradients reduced: the same on all ranks.

Ranks need not use the same units. A rank that reaches a unit first takes part in all unshards that
are expected before it, because others may need them, and at the end of the pass in the rest.
::

    expected     1 2 3 4 5
    reached        2   4        on this rank
    unshards    (1)2(3)4(5)     the same on every rank; in brackets: resharded at once

A unit that is not expected any more is unsharded when it is reached. That is right if all ranks do
so, and then all of them know that the order has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import final

from echelon.errors import StateError
from echelon.fsdp.hybrid_groups import HybridGroups

_FORWARD, _EVALUATION, _LEFT, _REDUCTIONS = "forward", "evaluation", "forwards left", "reductions"
MAX_FORWARDS = 8  # before one backward, of which each is expected to need unshards of its own


@final
class PassOrder:
    """The unshards that are expected in one kind of pass, and how far this rank has come.

    Law: after the unshards of ``take_rest()``, this rank has unsharded all expected units in their
    order, and besides them those that ``reach`` did not expect.

    Args:
        expected: the order.
        guess: whether no pass has shown it: then nothing is prefetched.

    Attributes:
        is_guess: see there.
        reached: what this rank has reached in this pass.
        unsharded: what was unsharded in this pass, the same on all ranks.
        strayed: whether a unit was reached that was not expected any more.

    Example:
        >>> order = PassOrder([1, 2, 3, 4, 5])
        >>> order.reach(2), order.reach(4), order.take_rest()
        ([1], [3], [5])
        >>> order.begin()
        >>> order.reach(3), order.reach(1), order.strayed
        ([1, 2], [], True)
    """

    def __init__(self, expected: Sequence[int], *, guess: bool = False) -> None:
        self._expected, self.is_guess = list(expected), guess
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self._position = 0
        self.reached: list[int] = []
        self.unsharded: list[int] = []
        self.strayed = False

    def reach(self, u: int) -> list[int]:
        """Unit ``u`` is unsharded next: the units whose unshards come before, in order."""
        self.reached.append(u)
        if u not in self._expected[self._position :]:
            self.strayed = True
            self.unsharded.append(u)
            return []
        before = self._take_until(self._expected.index(u, self._position))
        self.take_next()
        return before

    def reach_unsharded(self, u: int) -> list[int]:
        """Unit ``u`` has stayed unsharded: the unshards up to its own, which others may need.

        Example:
            >>> order = PassOrder([1, 2, 3, 4, 5])
            >>> order.reach_unsharded(3), order.reach_unsharded(2), order.reach(5)
            ([1, 2, 3], [], [4])
        """
        if u not in self._expected[self._position :]:
            return []
        return self._take_until(self._expected.index(u, self._position) + 1)

    def reach_prefetched(self, u: int) -> None:
        """Unit ``u`` is reached, whose unshard came before."""
        self.reached.append(u)

    @property
    def is_right(self) -> bool:
        """Whether passes have shown this order, and this one did, too."""
        return not self.is_guess and not self.strayed

    def peek(self) -> int | None:
        """The unit that is expected next; None if there is none, or nobody knows."""
        if not self.is_right or self._position == len(self._expected):
            return None
        return self._expected[self._position]

    def take_next(self) -> None:
        """The unshard of the next unit begins."""
        self._take_until(self._position + 1)

    def take_rest(self) -> list[int]:
        """The pass is over: the units whose unshards are left."""
        return self._take_until(len(self._expected))

    def _take_until(self, position: int) -> list[int]:
        taken, self._position = self._expected[self._position : position], position
        self.unsharded += taken
        return taken


@final
class ExecutionOrder:
    """The orders that all ranks expect: guesses at first, then what the ranks have done.

    A pass that strayed from its order did so on all ranks, or they would not have unsharded the
    same units. So all of them note the new one, and agree on it before the next forward.

    Args:
        reducing: units with gradients, the root, unit 0, first.
        communicating: units whose unshard communicates, but for the root.
        ancestors: by unit, the units of ``communicating`` that it is inside of, outermost first.

    Attributes:
        forward: unshards of the forward that was begun last.
        backward: unshards of the backward that was begun last.
        called: units that a forward has come to, in order, whether they were unsharded or not.
        num_forwards: with a graph, to which no backward may have come; ``MAX_FORWARDS`` stands for
            all larger numbers. What a backward unshards depends on it.
        all_unsharded: whether every unit that the backward may need has been unsharded since
            forward, on all ranks, so that no unshard is expected.
        is_resharded: whether all units were resharded since forward, on all ranks, also those that
            had stayed unsharded for their backward.
        reductions: the order in which gradients are reduced.
        left_out: units that no rank had to unshard for the backward of one forward, though all have
            used them: frozen ones, before all else. Where backward may come to one after all, it
            has to stay unsharded.
    """

    def __init__(
        self,
        reducing: Sequence[int],
        communicating: Sequence[int],
        ancestors: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._communicating, self._ancestors = list(communicating), ancestors or {}
        self._last_forward = self._communicating  # what the last forward has unsharded
        # By whether it makes a graph: what stays unsharded then is not unsharded again.
        self._forwards = {graph: PassOrder(communicating, guess=True) for graph in (True, False)}
        self._has_graph = True
        self.forward = self._forwards[True]
        self.called: list[int] = []
        self.num_forwards, self.all_unsharded, self.is_resharded = 0, False, False
        self._backwards: dict[str, PassOrder] = {}  # by what came before: see ``_kind``
        self.backward, self._backward_kind = PassOrder([], guess=True), ""
        self._guesses: dict[str, list[int]] = {}
        self.left_out: set[int] = set()
        self._several: set[str] = set()  # kinds of backward that do not follow one forward
        self._varying: set[str] = set()  # those of them whose units vary, and stay a guess
        self.reductions = list(reversed(reducing))  # the root's gradients come last
        self._noted: dict[str, tuple[list[int], list[int]]] = {}
        self._knows_reductions = False

    def begin_forward(self, has_graph: bool) -> None:
        """A forward begins."""
        self.is_resharded, self._has_graph = False, has_graph
        self.forward = self._forwards[has_graph]
        self.forward.begin()
        self.called = []

    def end_forward(self, has_graph: bool, stays_unsharded: bool) -> None:
        """A forward is over.

        Args:
            has_graph: whether a backward may follow.
            stays_unsharded: whether units then wait for it unsharded.
        """
        self._last_forward = self.forward.unsharded
        if not self.forward.is_right:
            kind = _FORWARD if self._has_graph else _EVALUATION
            self._noted[kind] = self.forward.reached, self.called
        # A forward begins with all units resharded, so what an older graph needs is sharded now.
        self.all_unsharded = has_graph and stays_unsharded and not self.num_forwards
        self.is_resharded = not has_graph
        self.num_forwards = min(self.num_forwards + has_graph, MAX_FORWARDS)

    def begin_backward(self, groups: HybridGroups, skips: bool) -> None:
        """A backward begins.

        Each of several forwards may use other units, and so one backward may come to a unit early
        and the next one late. What was seen is the order where all forwards use all units alone.

        Args:
            skips: whether a forward of this rank, whose backward may come, has left units out.
        """
        kind = self._kind(skips=False)
        order = self._expected_backward(kind)
        if kind in self._several and not order.is_guess and any(groups.all_gather_object(skips)):
            kind = self._kind(skips=True)
            order = self._expected_backward(kind)
        self.backward, self._backward_kind = order, kind
        order.begin()

    def _kind(self, *, skips: bool) -> str:
        """What came before a backward, as far as its unshards depend on it."""
        if self.all_unsharded:
            return "all unsharded"
        resharded = ", resharded" if self.is_resharded else ""
        return f"after {self.num_forwards} forwards{resharded}{', some skipped' * skips}"

    def _expected_backward(self, kind: str) -> PassOrder:
        if kind not in self._backwards:
            if not self.all_unsharded and (self.num_forwards != 1 or self.is_resharded):
                self._several.add(kind)
            # Backward runs through the last forward first.
            times = 0 if self.all_unsharded else self.num_forwards or 1
            guess = backward_guess(self._last_forward, self._ancestors) * times
            self._guesses[kind] = guess
            self._backwards[kind] = PassOrder(guess, guess=True)
        return self._backwards[kind]

    def end_backward(self, used: Collection[int], num_awaited: int) -> None:
        """A backward is over.

        Ranks may differ in ``num_awaited``, so until they have agreed, all forwards but one count.

        Args:
            used: units that all forwards before it have used.
            num_awaited: forwards to which no backward has come on this rank, and yet may.
        """
        if not self.backward.is_right and self._backward_kind not in self._varying:
            self._noted[self._backward_kind] = self.backward.reached, sorted(used)
        if self._communicating and (self.num_forwards > 1 or _LEFT in self._noted):
            self._noted[_LEFT] = [num_awaited], []
        self.num_forwards = max(self.num_forwards - 1, 0)
        self.all_unsharded = self.is_resharded = False

    def note_reductions(self, completed: Sequence[int]) -> None:
        """The gradients of a backward were complete in this order."""
        if not self._knows_reductions:
            self._knows_reductions = True
            self._noted[_REDUCTIONS] = list(completed), []

    def agree(self, groups: HybridGroups) -> None:
        """Before a forward: make what was noted the order of all ranks.

        Raises:
            StateError: some ranks have strayed from their order and some have not.
        """
        if not self._noted:
            return
        by_rank: list[dict[str, tuple[list[int], list[int]]]]
        by_rank = groups.all_gather_object(self._noted)
        self._noted = {}
        if len({tuple(noted) for noted in by_rank}) > 1:
            raise StateError(
                "some ranks have run their units in another order than before and some have not, "
                "so they have exchanged parameters of different units: run units in one order on "
                "all ranks; a rank may leave units out"
            )
        for kind in by_rank[0]:
            reached = [noted[kind][0] for noted in by_rank]
            more = [noted[kind][1] for noted in by_rank]
            if kind == _LEFT:
                self.num_forwards = min(max(max(left) for left in reached), MAX_FORWARDS)
            elif kind == _REDUCTIONS:
                self.reductions = common_order(reached, self.reductions)
            elif kind in (_FORWARD, _EVALUATION):
                order = common_order(reached, self._communicating)
                self._forwards[kind == _FORWARD] = PassOrder(order)
                if self._forwards[False].is_guess:  # where nothing stays unsharded
                    self._forwards[False] = PassOrder(common_order(more, self._communicating))
            else:
                self._agree_on_backward(kind, reached, set.intersection(*map(set, more)))

    def _agree_on_backward(self, kind: str, reached: list[list[int]], used: set[int]) -> None:
        """Those ``used`` by every forward and not unsharded for backward need no unshard there.

        They have stayed unsharded since forward, or are frozen and come before all else.
        """
        if kind in self._several and not used.issuperset(self._communicating):
            self._varying.add(kind)
            return
        order = common_order(reached, self._guesses[kind], without=used)
        self._backwards[kind] = PassOrder(order)
        if kind not in self._several:
            self.left_out = set(self._communicating).difference(order)


# Arithmetic of orders ------------------------------------------------------------------------


def backward_guess(forward: Sequence[int], ancestors: Mapping[int, Sequence[int]]) -> list[int]:
    """In which order backward probably reaches what a forward has unsharded.

    It runs from the end, and comes to the output of a unit before it comes to the units inside. Of
    a unit that came several times in ``forward``, the last one counts.

    Example:
        >>> backward_guess([1, 2, 3, 4], {3: [2], 4: [2]})  # units 3 and 4 are inside of 2
        [2, 4, 3, 1]
    """
    order: dict[int, None] = {}
    for u in reversed(forward):
        order |= dict.fromkeys(v for v in (*ancestors.get(u, ()), u) if v in forward)
    return list(order)


def common_order(
    orders: Sequence[Sequence[int]], usual: Sequence[int], without: Collection[int] = ()
) -> list[int]:
    """One order that contains the order of every rank, in which a unit may come several times.

    What one rank has reached before something else comes before it. Where no rank has reached both,
    the usual order decides. Where ranks contradict each other, the first one does. What no rank has
    reached, or not so often, comes where it is in ``usual``, unless it is in ``without``.

    Example:
        >>> common_order([[1, 4], [1, 2, 4]], usual=[1, 2, 3, 4, 5])
        [1, 2, 3, 4, 5]
        >>> common_order([[3, 1], [2]], usual=[3, 2, 1])
        [3, 2, 1]
        >>> common_order([[3, 1, 3]], usual=[1, 2, 3])
        [3, 1, 2, 3]
        >>> common_order([[2], [1]], usual=[2, 1, 2, 1], without=[1])
        [2, 1, 2]
    """
    merged = _merged(orders, usual)
    at = 0
    for item in _numbered(usual):
        if item in merged:
            at = merged.index(item) + 1
        elif item[0] not in without:
            merged.insert(at, item)
            at += 1
    return [u for u, _ in merged]


def _merged(orders: Sequence[Sequence[int]], usual: Sequence[int]) -> list[tuple[int, int]]:
    """All that ``orders`` have, each unit as often as one rank has reached it, numbered."""
    left = [_numbered(order) for order in dict.fromkeys(map(tuple, orders))]
    position = {item: at for at, item in enumerate(_numbered(usual))}
    merged: list[tuple[int, int]] = []
    while left := [order for order in left if order]:
        # What comes first wherever it comes; if nothing does, the ranks contradict each other.
        free = [o[0] for o in left if all(o[0] not in other[1:] for other in left)]
        first = left[0][0]
        if free:
            first = min(free, key=lambda item: position.get(item, position.get((item[0], 0), -1)))
        merged.append(first)
        left = [[item for item in order if item != first] for order in left]
    return merged


def _numbered(order: Sequence[int]) -> list[tuple[int, int]]:
    """Each unit with how often it came before."""
    return [(u, order[:at].count(u)) for at, u in enumerate(order)]
