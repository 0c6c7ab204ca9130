"""Which ranks wait for each other in a circle, under a rule of how sends and receives behave.

The walk says which ranks are held at its end; the shortest circle among their waits explains.

::

    rank 0 | ... 0SEND_F2  2RECV_B0          [1] 0SEND_F2 is held until rank 1 reaches 1RECV_F2
                     |         ^
                     v         |             [2] rank 1 comes there after 3SEND_B0, which is held
    rank 1 |     1RECV_F2  3SEND_B0 (first)      until rank 0 reaches 2RECV_B0, after 0SEND_F2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum, StrEnum
from typing import NamedTuple

from echelon.pipeline.schedules.action_lists import ActionLists, TransferEnd
from echelon.pipeline.schedules.dataflow import Transfer
from echelon.pipeline.schedules.ir import SENDS, Action, Item
from echelon.pipeline.schedules.walk import Channel, Walk


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


# Which transfers wait for one another; elsewhere none does.
_CHANNELS = {WaitRule.PAIR_QUEUE: Channel.PAIR, WaitRule.RANK_QUEUE: Channel.RANK}


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
    walk = _walk(lists, rule)
    deque(walk.run(), maxlen=0)
    return _Circles(lists, walk).shortest() if walk.held() else None


class _Arrived(dict[int, int]):
    """Whether a value has arrived; one that no transfer brings is there from the start."""

    def __missing__(self, number: int) -> int:
        return 1


def _walk(lists: ActionLists, rule: WaitRule) -> Walk:
    """The walk through lists, in which only values of other ranks are waited for."""
    ends, values, holds = lists.ends, lists.ends.values, rule is WaitRule.BLOCKING
    needs, gives = values.by_stage(ends.stages, own=False)
    for kind, row in needs.items():
        for stage, far in row.items():
            row[stage] = () if kind in SENDS and not holds else tuple(map(ends.arrival, far))

    def transfer_of(action: Action) -> Transfer | None:
        return ends.transfers.get(values.moved(action))

    return Walk(
        lists.orders,
        needs=needs,
        gives=gives,
        available=_Arrived.fromkeys(map(ends.arrival, ends.sent), 0),
        arrivals=values.count,
        transfer_of=transfer_of if lists.has_transfers else None,
        channel=_CHANNELS.get(rule, Channel.IDEAL),
        batches=lists.batches,
    )


def crossed_messages(lists: ActionLists) -> str | None:
    """The first message that a receive for another one would take, if messages had no names.

    Example:
        >>> from echelon.pipeline.schedules.action_lists import read
        >>> text = "0F0 0F1 0SEND_F0 0SEND_F1\\n1RECV_F1 1RECV_F0 1F0 1F1"
        >>> print(crossed_messages(read(text)).split(";")[0])
        rank 0 sends 0SEND_F0 (line 1, column 9) where rank 1 receives 1RECV_F1 (line 2, column 1)
    """
    ends = lists.ends
    sent: dict[tuple[int, int], list[tuple[TransferEnd, TransferEnd]]] = {}
    for send, receive in map(ends.of, ends.sent) if lists.has_transfers else ():
        sent.setdefault((send.rank, receive.rank), []).append((send, receive))
    for (src, dst), messages in sorted(sent.items()):
        by_send = sorted(messages)
        by_receive = sorted(messages, key=lambda ends: ends[1])
        partner = dict(messages)
        for (send, _), (_, receive) in zip(by_send, by_receive, strict=True):
            if partner[send] != receive:
                return (
                    f"rank {src} sends {_placed(lists, send)} where rank {dst} receives "
                    f"{_placed(lists, receive)}; where messages have no tags, as those of "
                    "PyTorch's stages, it takes the wrong one and no error is raised"
                )
    return None


def _placed(lists: ActionLists, end: TransferEnd) -> str:
    return f"{lists.orders[end.rank][end.position]} ({lists.place(end.rank, end.position)})"


# A rank that is held, or a transfer that is posted at one end and not through.
_Node = tuple[str, int]


class _Circles:
    """The waits that are left at the end of a walk, and the circles among them."""

    def __init__(self, lists: ActionLists, walk: Walk) -> None:
        self._lists, self._ends, self._walk = lists, lists.ends, walk

    def shortest(self) -> tuple[Wait, ...]:
        """The shortest circle of waits; of several, one with the lowest rank."""
        best: list[Wait] | None = None
        for rank in self._walk.held():
            for start in self._starts(rank):
                circle = self._circle_through(start, None if best is None else len(best))
                if circle is not None:
                    best = circle
        assert best is not None, "a rank is held, so the waits end in a circle"
        return tuple(best)

    def _starts(self, rank: int) -> list[_Node]:
        """The rank, and the transfers at the head of its queues."""
        if self._walk.channel is Channel.IDEAL:
            return [("rank", rank)]
        heads = [
            ("transfer", transfer.value)
            for (owner, _), queue in sorted(self._walk.queues.items())
            if owner == rank and queue
            for transfer in queue[0]
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

    def _waits_of(self, node: _Node) -> Iterator[tuple[_Node, Wait]]:
        """What a held rank or a transfer waits for."""
        kind, number = node
        if kind == "rank":
            yield from self._rank_waits(number)
            return
        # A transfer is posted at one end at least; from there its other end is waited for.
        for end in self._ends.of(number):
            if self._walk.has_issued(*end):
                yield from self._transfer_waits(number, end)

    def _rank_waits(self, rank: int) -> Iterator[tuple[_Node, Wait]]:
        """What holds a rank: values that have not arrived, or the sends of its batch."""
        for value, here in self._blockers(rank):
            unreached = self._unreached(value)
            for end in unreached:
                yield ("rank", end.rank), self._wait(here, end, WaitCause.REACH)
            if not unreached:
                there = self._ends.on(value, rank)
                yield ("transfer", value), self._wait(here, there, WaitCause.ARRIVE)

    def _blockers(self, rank: int) -> Iterator[tuple[int, TransferEnd]]:
        """The transfers that hold a rank, and the actions that they hold."""
        order, index = self._lists.orders[rank], self._walk.positions[rank]
        for position in self._walk.batch(rank, index):
            for part in order[position].parts:
                if part.kind in SENDS:
                    value = self._ends.values.moved(part)
                else:
                    value = self._ends.values.far(part)
                if value is not None and not self._walk.available[self._ends.arrival(value)]:
                    yield value, TransferEnd(rank, position)

    def _transfer_waits(self, value: int, end: TransferEnd) -> Iterator[tuple[_Node, Wait]]:
        """What the posted end of a transfer waits for: its other end, and its queue."""
        for other in self._unreached(value):
            yield ("rank", other.rank), self._wait(end, other, WaitCause.REACH)
        queue = self._walk.queue(end.rank, self._ends.transfers[value])
        ahead = [transfer.value for transfer in queue[0]]
        for before in () if value in ahead else ahead:
            there = self._ends.on(before, end.rank)
            yield ("transfer", before), self._wait(end, there, WaitCause.QUEUE)

    def _unreached(self, value: int) -> list[TransferEnd]:
        """The ends of a transfer that are not posted; nobody posts a receive that is not listed."""
        ends = self._ends.of(value) if self._lists.has_transfers else self._ends.of(value)[:1]
        return [end for end in ends if not self._walk.has_issued(*end)]

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
