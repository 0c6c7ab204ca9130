"""The one walk through a schedule: who can go on, and who never can.

A computation runs when its predecessors in the list of its rank are done and its inputs are there
(``dataflow``); a pair needs what both of its actions need. In a schedule without transfers a value
is available on all ranks at once. With transfers, a value of another rank is available when its
transfer is done. A receive is posted and its rank goes on. The transport decides the rest:

- whether a send holds its rank until the other end receives: ``check`` and ``simulate`` say so, as
  no transport needs more, and a ``WaitRule`` may say otherwise;
- which transfers wait for one another: those of a ``Channel``;
- which sends and receives are issued at once: each alone, or those of a batch.

Nothing here is a race: an action only ever waits for others that are all certain to be needed, so
whatever order the ranks run in, they get equally far. One walk therefore decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import Protocol

from echelon.errors import ScheduleError
from echelon.pipeline.schedules.dataflow import Numbers, Transfer, Values, transfer_of
from echelon.pipeline.schedules.ir import SENDS, TRANSFER, Action, Item, Schedule


class Channel(Enum):
    """Which transfers wait for one another."""

    IDEAL = "none: each transfer has a channel of its own"
    PAIR = "those between the same two ranks, in both directions"
    RANK = "all that a rank sends and receives"


def _queue_name(channel: Channel, rank: int, transfer: Transfer) -> tuple[int, object]:
    """The queue in which a rank posts its end of a transfer."""
    if channel is Channel.IDEAL:
        return rank, transfer
    return rank, transfer.pair() if channel is Channel.PAIR else None


# One step of a walk: the rank, the position in its list, the item there, and the transfer that a
# receive posts or a send makes, or None. It is a plain tuple because a walk makes very many.
Moment = tuple[int, int, Item, Transfer | None]


def walk(schedule: Schedule, channel: Channel = Channel.PAIR) -> Iterator[Moment]:
    """Every item of ``schedule``, each after its inputs; a deadlock is drawn in the error."""
    values, placement = Values(schedule.num_stages, schedule.num_microbatches), schedule.placement
    needs, gives = values.by_stage(range(schedule.num_stages))
    if schedule.is_lowered:
        for kind, row in needs.items():
            for stage, needed in row.items():
                far = [placement[values.stage(v)] != placement[stage] for v in needed]
                held = needed if kind in SENDS else ()  # until it has arrived
                row[stage] = (
                    *(v + values.count * is_far for v, is_far in zip(needed, far, strict=True)),
                    *(v + values.count for v in held),
                )
    steps = Walk(
        schedule.orders,
        needs=needs,
        gives=gives,
        available=bytearray(2 * values.count),
        arrivals=values.count,
        transfer_of=(lambda end: transfer_of(end, schedule, values))
        if schedule.is_lowered
        else None,
        channel=channel,
    )
    return chain(steps.run(), _refuse_deadlock(steps, schedule, values))


_NO_QUEUE = deque[list[Transfer]](maxlen=0)


class Availability(Protocol):
    """By number, whether a value is made or has arrived."""

    def __getitem__(self, number: int, /) -> int: ...

    def __setitem__(self, number: int, is_available: int, /) -> None: ...


class Walk:
    """Advances each rank until it needs a value, and again when the value is available.

    Args:
        orders: the lists of the ranks.
        needs: the numbers for which each kind of action waits, by stage. A send that waits for its
            arrival holds its rank until the other end receives.
        gives: the numbers that it makes available, by stage.
        available: by number.
        arrivals: by how much the number of the arrival of a value on the rank that needs it is
            larger than that of the value.
        transfer_of: the transfer of a send or a receive, None if it has no other end; None where
            values need no transfer.
        channel: which transfers wait for one another.
        batches: by rank, the batch of each action or None; those of a batch are issued at once.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Item]],
        *,
        needs: Numbers,
        gives: Numbers,
        available: Availability,
        arrivals: int,
        transfer_of: Callable[[Action], Transfer | None] | None,
        channel: Channel,
        batches: Sequence[Sequence[int | None]] | None = None,
    ) -> None:
        self._orders, self._needs, self._gives = orders, needs, gives
        self.available, self._arrivals, self._transfer_of = available, arrivals, transfer_of
        self.channel, self._batches = channel, batches
        self.positions = [0] * len(orders)
        self._issued = [0] * len(orders)  # where the last batch of sends and receives ended
        self.waiting: dict[int, list[int]] = {}  # by number: the ranks that wait for it
        self._runnable = deque(range(len(orders)))
        # By rank and channel: what the rank has posted, as batches; any of the first may run.
        self.queues: dict[tuple[int, object], deque[list[Transfer]]] = {}
        self._sends: dict[Transfer, tuple[int, Action]] = {}  # position and action of its send

    def run(self) -> Iterator[Moment]:
        """All moments, until nobody can go on."""
        # One loop without calls, because hundreds of thousands of computations pass here.
        orders, positions, issued = self._orders, self.positions, self._issued
        available, waiting, runnable = self.available, self.waiting, self._runnable
        needs, gives, lowered = self._needs, self._gives, self._transfer_of is not None
        while runnable:
            rank = runnable.popleft()
            order = orders[rank]
            for index in range(positions[rank], len(order)):
                item = order[index]
                parts = (item,) if isinstance(item, Action) else item.parts
                missing = None
                is_end = lowered and item.kind in TRANSFER
                if is_end and index >= issued[rank]:
                    yield from self._issue(rank, index)
                for kind, i, stage in parts:
                    for first in needs[kind][stage]:
                        if not available[first + (i or 0)] and missing is None:
                            missing = first + (i or 0)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    positions[rank] = index
                    break
                if is_end:
                    continue
                yield rank, index, item, None
                for kind, i, stage in parts:
                    for first in gives[kind][stage]:
                        number = first + (i or 0)
                        available[number] = 1
                        if number in waiting:
                            runnable.extend(waiting.pop(number))
            else:
                positions[rank] = len(order)

    def held(self) -> list[int]:
        """The ranks that are not at the end of their lists."""
        return [
            rank for rank, order in enumerate(self._orders) if self.positions[rank] < len(order)
        ]

    def has_issued(self, rank: int, position: int) -> bool:
        """Whether a rank has come to an action, and run it or posted its end of a transfer."""
        return position < max(self.positions[rank], self._issued[rank])

    def queue(self, rank: int, transfer: Transfer) -> deque[list[Transfer]]:
        """What a rank has posted on the channel of a transfer, as batches."""
        return self.queues.get(_queue_name(self.channel, rank, transfer), _NO_QUEUE)

    def batch(self, rank: int, index: int) -> range:
        """The positions of the sends and receives that are issued with the one at ``index``."""
        start, stop = index, index + 1
        numbers = () if self._batches is None else self._batches[rank]
        if not numbers or numbers[index] is None:
            return range(start, stop)
        while start > 0 and numbers[start - 1] == numbers[index]:
            start -= 1
        while stop < len(numbers) and numbers[stop] == numbers[index]:
            stop += 1
        return range(start, stop)

    def _issue(self, rank: int, index: int) -> Iterator[Moment]:
        """Post the ends of transfers of a batch, once, and make all that became possible.

        None is posted while a value that one of its sends needs is not made.
        """
        batch, order = self.batch(rank, index), self._orders[rank]
        ends = list[tuple[int, Action, Transfer]]()
        for position in batch:
            (action,) = order[position].parts
            transfer = None if self._transfer_of is None else self._transfer_of(action)
            if transfer is not None:
                ends.append((position, action, transfer))
        sends = {end: (position, send) for position, send, end in ends if send.kind in SENDS}
        if not all(self.available[end.value] and end not in self._sends for end in sends):
            return
        self._sends |= sends
        fresh: dict[tuple[int, object], list[Transfer]] = {}
        for position, action, transfer in ends:
            if action.kind not in SENDS:
                yield rank, position, action, transfer
            fresh.setdefault(_queue_name(self.channel, rank, transfer), []).append(transfer)
        for name, members in fresh.items():
            self.queues.setdefault(name, deque()).append(members)
        self._issued[rank] = batch.stop
        yield from self._transfer([transfer for *_, transfer in ends])

    def _transfer(self, fronts: list[Transfer]) -> Iterator[Moment]:
        """Make the transfers whose two ends are first in their queues, and those behind them."""
        while fronts:
            front = fronts.pop()
            first, second = self.queue(front.src, front), self.queue(front.dst, front)
            if not (first and front in first[0] and second and front in second[0]):
                continue
            for queue in (first, second):
                queue[0].remove(front)
                if not queue[0]:
                    queue.popleft()
                    fronts.extend(queue[0] if queue else ())
            position, send = self._sends[front]
            yield front.src, position, send, front
            number = self._arrivals + front.value
            self.available[number] = 1
            self._runnable.extend(self.waiting.pop(number, ()))


# --- a deadlock of a schedule, in words ----------------------------------------------------------


def _refuse_deadlock(steps: Walk, schedule: Schedule, values: Values) -> Iterator[Moment]:
    """No moment, but an error with the cycle of ranks that wait for one another, if there is."""
    yield from ()
    if not steps.held():
        return
    path, rows = list[int](), list[str]()
    rank: int | None = steps.held()[0]
    while rank is not None and rank not in path:
        path.append(rank)
        text, rank = _describe_wait(steps, schedule, values, rank)
        rows.append(text)
    first = path.index(rank) if rank is not None else 0
    raise ScheduleError("no rank can go on:\n" + "\n".join(f"  {row}" for row in rows[first:]))


def _describe_wait(
    steps: Walk, schedule: Schedule, values: Values, rank: int
) -> tuple[str, int | None]:
    """The value that a rank waits for, as text, and the rank that it waits for."""
    index = steps.positions[rank]
    missing = next(number for number, ranks in steps.waiting.items() if rank in ranks)
    start = f"rank {rank}, index {index}: {schedule.orders[rank][index]} waits for "
    value = missing % values.count
    owner = schedule.placement[values.stage(value)]
    if missing < values.count or not steps.available[value]:
        places = (
            place
            for place, item in enumerate(schedule.orders[owner])
            if value in map(values.result, item.parts)
        )
        there = next(places, None)
        if there is None:
            return f"{start}{values.text(value)}, which is in no list", None
        if steps.positions[owner] >= len(schedule.orders[owner]):
            return f"{start}{values.text(value)}, which rank {owner} does not send", None
        return f"{start}{values.text(value)} of rank {owner}, index {there}", owner
    what = f"the transfer of {values.text(value)}"
    for peer, order in enumerate(schedule.orders):
        ends = (item.parts[0] for item in order if item.kind in TRANSFER)
        if peer != rank and any(values.moved(end) == value for end in ends):
            return f"{start}{what} with rank {peer}", peer
    return f"{start}{what}, which no other rank posts", None
