"""In which order one pass gathers units, where all ranks must gather the same. Pure.

Ranks need not use the same units: a rank that reaches a unit first takes part in all gathers that
are expected before it, because others may need them, and at the end of the pass in the rest.
::

    expected     1 2 3 4 5
    reached        2   4        on this rank
    gathers     (1)2(3)4(5)     the same on every rank; in brackets: given back at once

A unit that is not expected any more is gathered when it is reached. That is right if all ranks do
so, and then all of them know that the order has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import final


@final
class Lineup:
    """The expected gathers of a pass, and how far this rank has come.

    Law: after ``rest()`` was joined, this rank has gathered all expected units in their order, and
    besides them those that ``reached`` did not expect.

    Args:
        expected: the order.
        guess: whether no pass has shown it: then nothing is gathered before it is needed.

    Attributes:
        is_guess: see there.
        real: what was reached in this pass.
        taken: what was gathered in this pass, the same on all ranks.
        strayed: whether a unit was reached that was not expected any more.

    Example:
        >>> lineup = Lineup([1, 2, 3, 4, 5])
        >>> lineup.reached(2), lineup.reached(4), lineup.rest()
        ([1], [3], [5])
        >>> lineup.begin()
        >>> lineup.reached(3), lineup.reached(1), lineup.strayed
        ([1, 2], [], True)
    """

    def __init__(self, expected: Sequence[int], *, guess: bool = False) -> None:
        self._expected, self.is_guess = list(expected), guess
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self._at = 0
        self.real: list[int] = []
        self.taken: list[int] = []
        self.strayed = False

    def reached(self, u: int) -> list[int]:
        """Unit ``u`` is gathered next: the units whose gathers come before, in order."""
        self.real.append(u)
        if u not in self._expected[self._at :]:
            self.strayed = True
            self.taken.append(u)
            return []
        at = self._expected.index(u, self._at)
        before, self._at = self._expected[self._at : at], at + 1
        self.taken += [*before, u]
        return before

    def passed(self, u: int) -> list[int]:
        """Unit ``u`` is whole already: the gathers that come up to its own, which others may need.

        Example:
            >>> lineup = Lineup([1, 2, 3, 4, 5])
            >>> lineup.passed(3), lineup.passed(2), lineup.reached(5)
            ([1, 2, 3], [], [4])
        """
        if u not in self._expected[self._at :]:
            return []
        at = self._expected.index(u, self._at) + 1
        passed, self._at = self._expected[self._at : at], at
        self.taken += passed
        return passed

    def arrived(self, u: int) -> None:
        """Note that unit ``u`` was reached, whose gather came before."""
        self.real.append(u)

    @property
    def is_right(self) -> bool:
        """Whether passes have shown this order, and this one did, too."""
        return not self.is_guess and not self.strayed

    def next(self) -> int | None:
        """The unit that is expected next; None if there is none, or nobody knows."""
        if not self.is_right or self._at == len(self._expected):
            return None
        return self._expected[self._at]

    def advance(self) -> None:
        """The gather of the next unit has begun ahead."""
        self.taken.append(self._expected[self._at])
        self._at += 1

    def rest(self) -> list[int]:
        """The pass is over: the units whose gathers are left."""
        left, self._at = self._expected[self._at :], len(self._expected)
        self.taken += left
        return left


def backward_guess(forward: Sequence[int], around: Mapping[int, Sequence[int]]) -> list[int]:
    """In which order backward probably reaches what a forward has gathered.

    It runs from the end, and comes to the output of a unit before it comes to the units inside.

    Args:
        forward: gathers of the forward; of a unit that came several times, the last one counts.
        around: by unit, the units that it is inside of, from the outermost on.

    Example:
        >>> backward_guess([1, 2, 3, 4], {3: [2], 4: [2]})  # units 3 and 4 are inside of 2
        [2, 4, 3, 1]
    """
    order: dict[int, None] = {}
    for u in reversed(forward):
        order |= dict.fromkeys(v for v in (*around.get(u, ()), u) if v in forward)
    return list(order)


def common_order(
    orders: Sequence[Sequence[int]], usual: Sequence[int], without: Collection[int] = ()
) -> list[int]:
    """One order that contains the order of every rank.

    What one rank has reached before something else comes before it. Where no rank has reached both,
    the usual order decides. Where ranks contradict each other, the first one does.

    Args:
        orders: of each rank; a unit may come several times.
        usual: what no rank has reached, or not so often, comes where it is in this one.
        without: units to leave out where no rank has reached them.

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
    found = _merged(orders, usual)
    at = 0
    for item in _numbered(usual):
        if item in found:
            at = found.index(item) + 1
        elif item[0] not in without:
            found.insert(at, item)
            at += 1
    return [u for u, _ in found]


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
