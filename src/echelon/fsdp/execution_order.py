"""In which order units are unsharded and their gradients reduced: the same on all ranks.

Ranks need not use the same units. A rank that reaches a unit first takes part in all unshards that
are expected before it, because other ranks may need them, and at the end of the pass in the rest.
::

    expected     1 2 3 4 5
    reached        2   4        on this rank
    unshards    (1)2(3)4(5)     the same on every rank; in brackets: resharded at once

A unit that is not expected any more is unsharded when it is reached. That is right if all ranks do
so, and then all of them know that the order has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from echelon.errors import StateError
from echelon.fsdp.hybrid_groups import HybridGroups

MAX_FORWARDS = 8  # Before one backward, so many are told apart: each may need other unshards.
_ORDERS = "orders of units (where a rank has no batch, use model.join())"


@final
class PassOrder:
    """The unshards that are expected in one kind of pass, and the position of this rank in them.

    Law: after the unshards of ``take_rest()``, this rank has unsharded all expected units in their
    order, and besides them those that ``reach`` did not expect.

    Attributes:
        is_guess: whether no pass has shown this order yet; then nothing is prefetched.
        reached: the units that this rank has reached in this pass.
        unsharded: the units that were unsharded in this pass, the same on all ranks.
        deviated: whether a unit was reached that was not expected any more.

    Example:
        >>> order = PassOrder([1, 2, 3, 4, 5])
        >>> order.reach(2), order.reach(4), order.take_rest()
        ([1], [3], [5])
        >>> order.begin()
        >>> order.reach(3), order.reach(1), order.deviated
        ([1, 2], [], True)
    """

    def __init__(self, expected: Sequence[int], *, is_guess: bool = False) -> None:
        self._expected, self.is_guess = list(expected), is_guess
        self.begin()

    def begin(self) -> None:
        """Begin a pass."""
        self._position = 0
        self.reached: list[int] = []
        self.unsharded: list[int] = []
        self.deviated = False

    def reach(self, u: int) -> list[int]:
        """Unit ``u`` is unsharded next; returns the units whose unshards come before, in order."""
        self.reached.append(u)
        if u not in self._expected[self._position :]:
            self.deviated = True
            self.unsharded.append(u)
            return []
        before = self._take_until(self._expected.index(u, self._position))
        self.take_next()
        return before

    def reach_unsharded(self, u: int) -> list[int]:
        """Unit ``u`` has stayed unsharded; returns the unshards up to its own, for other ranks.

        Example:
            >>> order = PassOrder([1, 2, 3, 4, 5])
            >>> order.reach_unsharded(3), order.reach_unsharded(2), order.reach(5)
            ([1, 2, 3], [], [4])
        """
        if u not in self._expected[self._position :]:
            return []
        return self._take_until(self._expected.index(u, self._position) + 1)

    def note_reached(self, u: int) -> None:
        """Unit ``u`` is reached, and was unsharded before."""
        self.reached.append(u)

    @property
    def is_confirmed(self) -> bool:
        """Whether earlier passes have shown this order, and this pass has followed it so far."""
        return not self.is_guess and not self.deviated

    def peek(self) -> int | None:
        """The unit that is expected next; None at the end, or where the order is not confirmed."""
        if not self.is_confirmed or self._position == len(self._expected):
            return None
        return self._expected[self._position]

    def take_next(self) -> None:
        """The unshard of the next unit begins."""
        self._take_until(self._position + 1)

    def take_rest(self) -> list[int]:
        """The pass is over; returns the units whose unshards are left."""
        return self._take_until(len(self._expected))

    def _take_until(self, position: int) -> list[int]:
        taken, self._position = self._expected[self._position : position], position
        self.unsharded += taken
        return taken


class BackwardKind(NamedTuple):
    """What precedes a backward, as far as its unshards depend on it."""

    all_unsharded: bool  # then nothing else matters
    num_forwards: int = 0
    is_resharded: bool = False  # since forward
    skips_units: bool = False  # in a forward of some rank

    @property
    def follows_one_forward(self) -> bool:
        """Whether its order follows from that of one forward."""
        return self.all_unsharded or (self.num_forwards == 1 and not self.is_resharded)


class PassNote(NamedTuple):
    """The units that one rank had to unshard in a pass, and those that the forwards have used."""

    reached: list[int]
    used: list[int]  # for a backward: by all forwards before it


@dataclass(slots=True)
class Notes:
    """What one rank has seen since all ranks last agreed on their orders.

    Attributes:
        forwards: forwards that did not follow their order, by whether they made a graph.
        backwards: backwards that did not follow theirs.
        reductions: the order in which the gradients of the first backward were complete.
        num_forwards: the number of forwards to which a backward may still come.
    """

    forwards: dict[bool, PassNote] = field(default_factory=dict)
    backwards: dict[BackwardKind, PassNote] = field(default_factory=dict)
    reductions: list[int] | None = None
    num_forwards: int | None = None

    @property
    def kinds(self) -> tuple[object, ...]:
        """Which notes there are: the same on all ranks that have followed the same orders."""
        others = self.reductions is None, self.num_forwards is None
        return tuple(self.forwards), tuple(self.backwards), others

    def all_gather(self, groups: HybridGroups) -> list[Notes]:
        """The notes of all ranks, which travel as plain tuples."""
        forwards = [(kind, *note) for kind, note in self.forwards.items()]
        backwards = [(tuple(kind), *note) for kind, note in self.backwards.items()]
        items = (forwards, backwards, self.reductions, self.num_forwards)
        return [
            Notes(
                {kind: PassNote(*note) for kind, *note in forwards},
                {BackwardKind(*kind): PassNote(*note) for kind, *note in backwards},
                *others,
            )
            for forwards, backwards, *others in groups.all_gather_object(items, _ORDERS)
        ]


@final
class ExecutionOrder:
    """The orders that all ranks expect: guesses at first, then what the ranks have done.

    If a pass deviates from its order, it does so on all ranks, as all of them unshard the same
    units. So all of them note the new order, and agree on it before the next forward. Where no
    unshard communicates, only the order of reductions is agreed on.

    ``reducing`` are the units with gradients, the root (unit 0) first, and ``communicating`` those
    whose unshard communicates, without the root. ``ancestors`` has, by unit, the units of
    ``communicating`` that contain it, the outermost first.

    Attributes:
        forward: the unshards of the forward that was begun last.
        backward: the unshards of the backward that was begun last.
        called: the units that the last forward has called, in order, unsharded before or not.
        num_forwards: the number of forwards with a graph that no backward may have reached; at most
            ``MAX_FORWARDS``, which stands for all larger numbers.
        all_unsharded: whether every unit that the next backward may need has stayed unsharded since
            forward, on all ranks, so that no unshard is expected.
        is_resharded: whether all units were resharded since forward, on all ranks.
        reductions: the order in which gradients are reduced.
        unsharded_only_in_forward: the units that all ranks use and none unshards for the backward
            of one forward, such as frozen ones. They stay unsharded if backward may reach them.
    """

    def __init__(
        self,
        reducing: Sequence[int],
        communicating: Sequence[int],
        ancestors: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._communicating, self._ancestors = list(communicating), ancestors or {}
        self._last_forward = self._communicating  # what the last forward has unsharded
        # By whether they make a graph: units that stay unsharded then are not unsharded again.
        self._forwards = {graph: PassOrder(communicating, is_guess=True) for graph in (True, False)}
        self._has_graph = True
        self.forward = self._forwards[True]
        self.called: list[int] = []
        self.num_forwards, self.all_unsharded, self.is_resharded = 0, False, False
        self._backwards: dict[BackwardKind, PassOrder] = {}
        self._guesses: dict[BackwardKind, list[int]] = {}
        self._varying: set[BackwardKind] = set()  # kinds whose units vary, so they stay a guess
        self._backward_kind = BackwardKind(all_unsharded=True)
        self.backward = PassOrder([], is_guess=True)
        self.unsharded_only_in_forward: set[int] = set()
        self.reductions = list(reversed(reducing))  # the root's gradients are complete last
        self._knows_reductions = False
        self._notes = Notes()

    def begin_forward(self, has_graph: bool) -> None:
        """A forward begins."""
        self.is_resharded, self._has_graph = False, has_graph
        self.forward = self._forwards[has_graph]
        self.forward.begin()
        self.called = []

    def end_forward(self, stays_unsharded: bool) -> None:
        """A forward is over; ``stays_unsharded``: its units wait for a backward unsharded."""
        self._last_forward = self.forward.unsharded
        if self._communicating and not self.forward.is_confirmed:
            self._notes.forwards[self._has_graph] = PassNote(self.forward.reached, self.called)
        # A forward begins with all units resharded, also those that an older graph needs.
        self.all_unsharded = self._has_graph and stays_unsharded and not self.num_forwards
        self.is_resharded = not self._has_graph
        self.num_forwards = min(self.num_forwards + self._has_graph, MAX_FORWARDS)

    def begin_backward(self, groups: HybridGroups, skips_units: bool) -> None:
        """A backward begins.

        Several forwards may use different units, so one backward may reach a unit early and the
        next one late. Only if all forwards have used all units does the order repeat itself.
        ``skips_units`` tells whether a forward of this rank has left units out.
        """
        kind = BackwardKind(all_unsharded=True)
        if not self.all_unsharded:
            kind = BackwardKind(False, self.num_forwards, self.is_resharded)
        order = self._expected_backward(kind)
        is_known = not kind.follows_one_forward and not order.is_guess
        if is_known and any(groups.all_gather_object(skips_units)):
            kind = kind._replace(skips_units=True)
            order = self._expected_backward(kind)
        self.backward, self._backward_kind = order, kind
        order.begin()

    def _expected_backward(self, kind: BackwardKind) -> PassOrder:
        if kind not in self._backwards:
            # Backward runs through the last forward first.
            times = 0 if kind.all_unsharded else kind.num_forwards or 1
            self._guesses[kind] = backward_guess(self._last_forward, self._ancestors) * times
            self._backwards[kind] = PassOrder(self._guesses[kind], is_guess=True)
        return self._backwards[kind]

    def end_backward(self, used: Collection[int], num_forwards: int) -> None:
        """A backward is over; ``used`` are the units that all forwards before it have used.

        No backward has reached ``num_forwards`` forwards on this rank, and one may. Ranks may
        differ in that, so until they have agreed, all forwards but one count.
        """
        varies = self._backward_kind in self._varying
        if self._communicating and not self.backward.is_confirmed and not varies:
            note = PassNote(self.backward.reached, sorted(used))
            self._notes.backwards[self._backward_kind] = note
        has_several = self.num_forwards > 1 or self._notes.num_forwards is not None
        if self._communicating and has_several:
            self._notes.num_forwards = num_forwards
        self.num_forwards = max(self.num_forwards - 1, 0)
        self.all_unsharded = self.is_resharded = False

    def note_reductions(self, completed: Sequence[int]) -> None:
        """The gradients of a backward were complete in this order."""
        if not self._knows_reductions:
            self._knows_reductions = True
            self._notes.reductions = list(completed)

    def agree(self, groups: HybridGroups) -> None:
        """Before a forward, turn the notes of all ranks into the orders that all expect.

        Raises StateError if some ranks have deviated from their order and some have not.
        """
        if self._notes == Notes():
            return
        by_rank = self._notes.all_gather(groups)
        self._notes = Notes()
        if len({notes.kinds for notes in by_rank}) > 1:
            raise StateError(
                "some ranks have run their units in another order than before and some have not, "
                "so they have exchanged parameters of different units: run units in one order on "
                "all ranks; a rank may leave units out"
            )
        for has_graph in by_rank[0].forwards:
            self._agree_on_forward(has_graph, [notes.forwards[has_graph] for notes in by_rank])
        for kind in by_rank[0].backwards:
            self._agree_on_backward(kind, [notes.backwards[kind] for notes in by_rank])
        reductions = [n.reductions for n in by_rank if n.reductions is not None]
        if reductions:
            self.reductions = common_order(reductions, self.reductions)
        num_forwards = [n.num_forwards for n in by_rank if n.num_forwards is not None]
        if num_forwards:
            self.num_forwards = min(max(num_forwards), MAX_FORWARDS)

    def _agree_on_forward(self, has_graph: bool, notes: Sequence[PassNote]) -> None:
        order = common_order([note.reached for note in notes], self._communicating)
        self._forwards[has_graph] = PassOrder(order)
        if self._forwards[False].is_guess:  # without a graph no unit stays unsharded
            order = common_order([note.used for note in notes], self._communicating)
            self._forwards[False] = PassOrder(order)

    def _agree_on_backward(self, kind: BackwardKind, notes: Sequence[PassNote]) -> None:
        """Expect no unshard of units that every forward has used and no backward had to unshard.

        They have stayed unsharded since forward, or are frozen and come before all else.
        """
        used = set.intersection(*(set(note.used) for note in notes))
        if not kind.follows_one_forward and not used.issuperset(self._communicating):
            self._varying.add(kind)
            return
        orders = [note.reached for note in notes]
        order = common_order(orders, self._guesses[kind], without=used)
        self._backwards[kind] = PassOrder(order)
        if kind.follows_one_forward:
            self.unsharded_only_in_forward = set(self._communicating).difference(order)


# Arithmetic of orders ------------------------------------------------------------------------


def backward_guess(forward: Sequence[int], ancestors: Mapping[int, Sequence[int]]) -> list[int]:
    """The order in which backward probably reaches the units that a forward has unsharded.

    It begins with the last unit, and reaches the output of a unit before the units inside of it. If
    a unit is in ``forward`` several times, its last place counts.

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
    """One order that contains the order of every rank; a unit may be in it several times.

    A unit comes before another if a rank has reached them so. Where no rank has reached both, the
    usual order decides, and where ranks contradict each other, the first rank does. Units that no
    rank has reached, or not so often, are put where they are in ``usual``, unless they are in
    ``without``.

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
    position = 0
    for item in _numbered(usual):
        if item in merged:
            position = merged.index(item) + 1
        elif item[0] not in without:
            merged.insert(position, item)
            position += 1
    return [u for u, _ in merged]


def _merged(orders: Sequence[Sequence[int]], usual: Sequence[int]) -> list[tuple[int, int]]:
    """All units of ``orders``, numbered, each as often as the rank that reached it most often."""
    left = [_numbered(order) for order in dict.fromkeys(map(tuple, orders))]
    positions = {item: position for position, item in enumerate(_numbered(usual))}
    merged: list[tuple[int, int]] = []
    while left := [order for order in left if order]:
        # Items that are first in every order that has them; if there is none, ranks contradict.
        free = [o[0] for o in left if all(o[0] not in other[1:] for other in left)]
        first = left[0][0]
        if free:
            first = min(free, key=lambda item: positions.get(item, positions.get((item[0], 0), -1)))
        merged.append(first)
        left = [[item for item in order if item != first] for order in left]
    return merged


def _numbered(order: Sequence[int]) -> list[tuple[int, int]]:
    """Each unit with the number of times that it is in ``order`` before."""
    return [(u, order[:position].count(u)) for position, u in enumerate(order)]
