"""Which ranks wait for each other in a circle, under a rule of how sends and receives behave.

Nothing here is a race: an action only ever waits for others that are all certain to be needed, so
whatever order the ranks run in, they get equally far. One walk therefore decides, and the shortest
circle among the waits that are left at its end explains.

::

    rank 0 | ... 0SEND_F2  2RECV_B0          [1] 0SEND_F2 is held until rank 1 reaches 1RECV_F2
                     |         ^
                     v         |             [2] rank 1 comes there after 3SEND_B0, which is held
    rank 1 |     1RECV_F2  3SEND_B0 (first)      until rank 0 reaches 2RECV_B0, after 0SEND_F2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import NamedTuple

from echelon.pipeline.schedules.action_lists import ActionLists
from echelon.pipeline.schedules.ir import Item
from echelon.pipeline.schedules.transfer_ends import TransferEnd, TransferTable


class WaitRule(StrEnum):
    """How sends and receives behave.

    A receive never holds its rank: it is posted, and the computation that needs it waits. Messages
    have names, so a receive takes the one that it is for.

    Example:
        >>> [str(rule) for rule in WaitRule]
        ['blocking', 'eager', 'pair-queue', 'rank-queue']
    """

    BLOCKING = "blocking"  # a send holds its rank until the receive is posted (rendezvous)
    EAGER = "eager"  # a send is buffered and holds nobody
    PAIR_QUEUE = "pair-queue"  # transfers of two ranks run one by one, in both lists' order
    RANK_QUEUE = "rank-queue"  # all transfers of a rank run one by one, in its list's order

    @property
    def words(self) -> str:
        """The rule in words."""
        return {
            WaitRule.BLOCKING: "blocking sends",
            WaitRule.EAGER: "eager sends",
            WaitRule.PAIR_QUEUE: "one queue for each pair of ranks",
            WaitRule.RANK_QUEUE: "one queue for each rank",
        }[self]


class WaitCause(Enum):
    """Why an action waits for another one."""

    REACH = "the other rank has not come to that action"
    QUEUE = "it is behind that action in a queue of its rank"
    ARRIVE = "that receive of its rank is not through"


class Wait(NamedTuple):
    """An action that waits for another one, as a part of a circle.

    Attributes:
        rank: which rank waits.
        position: that of the waiting action in its list, from 0.
        action: the waiting action.
        for_rank: the rank of the action that is waited for.
        for_position: its position in the list of that rank.
        for_action: the action that is waited for.
        cause: why.
    """

    rank: int
    position: int
    action: Item
    for_rank: int
    for_position: int
    for_action: Item
    cause: WaitCause


def find_circle(lists: ActionLists, rule: WaitRule) -> tuple[Wait, ...] | None:
    """The ranks that wait for each other under a rule, or None if all ranks come to their end.

    Lists without sends and receives are judged by the order of their computations alone.

    Returns:
        each wait is for an action that comes after, or is in one transfer with, the action of the
        next one, and the last is for one behind the first; the shortest circle.

    Example:
        >>> from echelon.pipeline.schedules.action_lists import read
        >>> lists = read("[... 0SendF1, 2RecvF0, 2F0]\\n[... 1SendF0, 1RecvF1, 1F1]")
        >>> for wait in find_circle(lists, WaitRule.BLOCKING):
        ...     print(wait.rank, wait.action, wait.for_rank, wait.for_action)
        0 0SEND_F1 1 1RECV_F1
        1 1SEND_F0 0 2RECV_F0
        >>> find_circle(lists, WaitRule.EAGER) is None
        True
    """
    return _Walkers(lists, rule).run()


# A rank that is held, or a transfer that is posted at one end and not through.
_Node = tuple[str, int]


class _Walkers:
    """Advances each rank until it is held, and again when what held it is through."""

    def __init__(self, lists: ActionLists, rule: WaitRule) -> None:
        self._lists, self._rule = lists, rule
        self._transfers = TransferTable(lists)
        hold = rule is WaitRule.BLOCKING
        self._entries = [
            self._transfers.entries(order, batches, hold)
            for order, batches in zip(lists.orders, lists.batches, strict=True)
        ]
        count = len(self._transfers.sent)
        self._positions = [0] * len(lists.orders)
        self._posted = [False] * len(lists.orders)  # whether the entry at the position has posted
        # The number of ends that are posted; in lists without transfers, nobody posts the other.
        self._ends = [0 if self._transfers.explicit else 1] * count
        self._through = bytearray(count)
        self._waiting: dict[int, list[int]] = {}  # by transfer: the ranks that it holds
        self._runnable = deque(range(len(lists.orders)))
        self._is_queued = self._transfers.explicit and rule in (
            WaitRule.PAIR_QUEUE,
            WaitRule.RANK_QUEUE,
        )
        # By rank and name of the queue: entries of transfers, of which those of the first may run.
        self._queues: dict[tuple[int, int], deque[list[int]]] = {}

    def run(self) -> tuple[Wait, ...] | None:
        """Walk as far as possible; the shortest circle if some rank is held at the end."""
        while self._runnable:
            self._advance(self._runnable.popleft())
        held = [r for r, done in enumerate(self._positions) if done < len(self._entries[r])]
        return self._shortest_circle(held) if held else None

    def _advance(self, rank: int) -> None:
        entries, through = self._entries[rank], self._through
        position = self._positions[rank]
        while position < len(entries):
            entry = entries[position]
            blocker = None
            if not self._posted[rank]:
                blocker = next((n for n in entry.needs if not through[n]), None)
                if blocker is None:
                    self._posted[rank] = True
                    self._post(rank, entry.posts)
            if blocker is None:
                blocker = next((n for n in entry.holds if not through[n]), None)
            if blocker is not None:
                self._waiting.setdefault(blocker, []).append(rank)
                break
            position += 1
            self._posted[rank] = False
        self._positions[rank] = position

    def _post(self, rank: int, numbers: Sequence[int]) -> None:
        """Post ends of transfers at once, and let run what can."""
        if self._is_queued:
            fresh: dict[tuple[int, int], list[int]] = {}
            for number in numbers:
                fresh.setdefault(self._queue_name(rank, number), []).append(number)
            for name, members in fresh.items():
                self._queues.setdefault(name, deque()).append(members)
        for number in numbers:
            self._ends[number] += 1
        self._complete(numbers)

    def _queue_name(self, rank: int, number: int) -> tuple[int, int]:
        if self._rule is WaitRule.RANK_QUEUE:
            return rank, rank
        return rank, self._transfers.other_end(number, rank).rank

    def _complete(self, numbers: Sequence[int]) -> None:
        """Run the transfers that can, and those that were queued behind them."""
        candidates = list(numbers)
        while candidates:
            number = candidates.pop()
            if self._ends[number] < 2 or self._through[number]:
                continue
            if self._is_queued:
                ends = self._transfers.sent[number], self._transfers.received[number]
                queues = [self._queues[self._queue_name(end.rank, number)] for end in ends]
                if not all(queue and number in queue[0] for queue in queues):
                    continue
                for queue in queues:
                    queue[0].remove(number)
                    if not queue[0]:
                        queue.popleft()
                        candidates.extend(queue[0] if queue else ())
            self._through[number] = 1
            self._runnable.extend(self._waiting.pop(number, ()))

    # --- the circle ------------------------------------------------------------------------------

    def _shortest_circle(self, held: Sequence[int]) -> tuple[Wait, ...]:
        """The shortest circle of waits; of several, one with the lowest rank."""
        best: list[Wait] | None = None
        for rank in held:
            for start in self._starts(rank):
                circle = self._circle_through(start, None if best is None else len(best))
                if circle is not None:
                    best = circle
        assert best is not None, "a rank is held, so the waits end in a circle"
        return tuple(best)

    def _starts(self, rank: int) -> list[_Node]:
        """The rank, and the transfers at the head of its queues."""
        heads = [
            ("transfer", number)
            for (owner, _), queue in sorted(self._queues.items())
            if owner == rank and queue
            for number in queue[0]
        ]
        return [("rank", rank), *heads]

    def _circle_through(self, start: _Node, shorter_than: int | None) -> list[Wait] | None:
        """The shortest way of waits from a node back to itself."""
        ways: dict[_Node, tuple[_Node, Wait]] = {}
        frontier, length = [start], 0
        while frontier and (shorter_than is None or length + 1 < shorter_than):
            length += 1
            later = []
            for node in frontier:
                for following, wait in self._waits_of(node):
                    if following == start:
                        circle = [wait]
                        while node != start:
                            node, wait = ways[node]
                            circle.append(wait)
                        return circle[::-1]
                    if following not in ways:
                        ways[following] = node, wait
                        later.append(following)
            frontier = later
        return None

    def _waits_of(self, node: _Node) -> list[tuple[_Node, Wait]]:
        """What a held rank or a transfer waits for."""
        kind, number = node
        if kind == "transfer":
            # It is posted at one end at least; from there its other end is waited for.
            return [
                step
                for end in (self._transfers.sent[number], self._transfers.received[number])
                if self._is_posted(end)
                for step in self._transfer_waits(number, end)
            ]
        entry = self._entries[number][self._positions[number]]
        blockers = entry.holds if self._posted[number] else entry.needs
        steps = []
        for blocker in blockers:
            if self._through[blocker]:
                continue
            index = (
                self._transfers.sent[blocker].position if self._posted[number] else entry.position
            )
            here = TransferEnd(number, index)
            unreached = self._unreached(blocker)
            for end in unreached:
                steps.append((("rank", end.rank), self._wait(here, end, WaitCause.REACH)))
            if not unreached:
                end = self._transfers.end_on(blocker, number)
                steps.append((("transfer", blocker), self._wait(here, end, WaitCause.ARRIVE)))
        return steps

    def _transfer_waits(self, number: int, end: TransferEnd) -> list[tuple[_Node, Wait]]:
        """What the posted end of a transfer waits for: its other end, and its queue."""
        steps = [
            (("rank", other.rank), self._wait(end, other, WaitCause.REACH))
            for other in self._unreached(number)
        ]
        queue = self._queues[self._queue_name(end.rank, number)]
        if number not in queue[0]:
            for ahead in queue[0]:
                before = self._transfers.end_on(ahead, end.rank)
                wait = self._wait(end, before, WaitCause.QUEUE)
                steps.append((("transfer", ahead), wait))
        return steps

    def _unreached(self, number: int) -> list[TransferEnd]:
        """The ends of a transfer that are not posted."""
        ends = [self._transfers.sent[number]]
        if self._transfers.explicit:
            ends.append(self._transfers.received[number])
        return [end for end in ends if not self._is_posted(end)]

    def _is_posted(self, end: TransferEnd) -> bool:
        """Whether a rank has come to an action and run it."""
        position, entries = self._positions[end.rank], self._entries[end.rank]
        if position >= len(entries) or end.position < entries[position].position:
            return True
        following = entries[position + 1].position if position + 1 < len(entries) else None
        return self._posted[end.rank] and (following is None or end.position < following)

    def _wait(self, here: TransferEnd, there: TransferEnd, cause: WaitCause) -> Wait:
        orders = self._lists.orders
        return Wait(
            rank=here.rank,
            position=here.position,
            action=orders[here.rank][here.position],
            for_rank=there.rank,
            for_position=there.position,
            for_action=orders[there.rank][there.position],
            cause=cause,
        )
