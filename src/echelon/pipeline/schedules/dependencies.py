"""The dependencies of actions, and the one walk through a schedule that follows them.

A computation runs when its predecessors in the list of its rank are done and its inputs are there:

======================  ========================================================================
``F`` of stage j        the output of stage j-1 for the same microbatch
``B``, ``I`` of j       the output of stage j, and the gradient of stage j+1 (its ``B`` or ``I``)
``W`` of j              the gradient of stage j (its ``I``)
a pair                  what both of its actions need
======================  ========================================================================

In a schedule without transfers a value is available on all ranks at once. With transfers, a value
of another rank is available when its transfer is done. Transfers between two ranks happen in the
order in which both ranks list them. A receive is posted and the rank goes on; a send holds its rank
until the other end receives. No transport needs more, so a schedule that runs here runs on all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from echelon.errors import ScheduleError
from echelon.pipeline.schedules.ir import (
    BACKWARD,
    FORWARD,
    INPUT,
    SENDS,
    TRANSFER,
    WEIGHT,
    Action,
    Item,
    Kind,
    Schedule,
)


class Channel(Enum):
    """Which transfers wait for one another."""

    IDEAL = "none: each transfer has a channel of its own"
    PAIR = "those between the same two ranks, in both directions"
    RANK = "all that a rank sends and receives"


class Values:
    """Numbers the values that computations produce, so that they can index a list.

    A value is the output of a stage for a microbatch, or the gradient of its inputs. There are
    ``count`` of them.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._num_stages, self._num_microbatches = (
            schedule.num_stages,
            schedule.num_microbatches,
        )
        self._gradients = schedule.num_stages * schedule.num_microbatches
        self.count = 2 * self._gradients

    def output(self, stage: int, microbatch: int) -> int:
        """The output of a stage."""
        return stage * self._num_microbatches + microbatch

    def gradient(self, stage: int, microbatch: int) -> int:
        """The gradient of the inputs of a stage."""
        return self._gradients + stage * self._num_microbatches + microbatch

    def stage(self, value: int) -> int:
        """The stage that produces a value."""
        return value % self._gradients // self._num_microbatches

    def text(self, value: int) -> str:
        """The text of the action that produces a value; a backward is written as ``B``."""
        kind = "F" if value < self._gradients else "B"
        return f"{self.stage(value)}{kind}{value % self._num_microbatches}"

    def needed(self, part: Action) -> tuple[int, ...]:
        """The inputs of a computation, those of its own stage last; none of other actions."""
        kind, i, stage = part
        if i is None:
            return ()
        output = stage * self._num_microbatches + i
        if kind is FORWARD:
            return (output - self._num_microbatches,) if stage else ()
        if kind is WEIGHT:
            return (self._gradients + output,)
        if kind is BACKWARD or kind is INPUT:
            if stage + 1 < self._num_stages:
                return (self._gradients + output + self._num_microbatches, output)
            return (output,)
        return ()

    def result(self, part: Action) -> int | None:
        """The value that a computation produces; a whole backward has that of its first half."""
        kind, i, stage = part
        if i is None:
            return None
        if kind is FORWARD:
            return stage * self._num_microbatches + i
        if kind is BACKWARD or kind is INPUT:
            return self._gradients + stage * self._num_microbatches + i
        return None


class Transfer(NamedTuple):
    """The transfer of a value, by its number in ``Values``, from one rank to another."""

    value: int
    src: int
    dst: int

    def pair(self) -> tuple[int, int]:
        """The two ranks, in ascending order."""
        return min(self.src, self.dst), max(self.src, self.dst)


# One step of a walk: the rank, the position in its list, the item there, and the transfer that a
# receive posts or a send makes, or None. It is a plain tuple because a walk makes very many.
Moment = tuple[int, int, Item, Transfer | None]


def transfer_of(
    action: Action, schedule: Schedule, values: Values, *, index: int | None = None
) -> Transfer:
    """The transfer of a send or a receive, at position ``index`` of the list of its rank."""
    kind, i, stage = action
    forward = kind in (Kind.SEND_F, Kind.RECV_F)
    step = 1 if forward else -1
    source = stage if kind in SENDS else stage - step
    target = source + step
    if not (0 <= source < schedule.num_stages and 0 <= target < schedule.num_stages):
        raise ScheduleError(
            f"stage {stage} has no neighbour to exchange this with",
            rank=schedule.placement[stage],
            index=index,
            action=action,
        )
    value = values.output(source, i or 0) if forward else values.gradient(source, i or 0)
    return Transfer(value, schedule.placement[source], schedule.placement[target])


def walk(schedule: Schedule, channel: Channel = Channel.PAIR) -> Iterator[Moment]:
    """Every item of ``schedule``, each after its inputs; a deadlock is drawn in the error."""
    return _Walk(schedule, channel).run()


_Numbers = dict[Kind, list[tuple[int, ...]]]  # by kind and stage


class _Walk:
    """Advances each rank until it needs a value, and again when the value is available."""

    def __init__(self, schedule: Schedule, channel: Channel) -> None:
        self._schedule, self._channel, self._lowered = schedule, channel, schedule.is_lowered
        self._values = Values(schedule)
        self._positions = [0] * schedule.num_ranks
        # By number: whether a value is computed; at ``count`` more, whether it has arrived on the
        # rank that needs it. Ranks wait for one of these numbers.
        self._available = bytearray(2 * self._values.count)
        self._waiting: dict[int, list[int]] = {}
        self._needs, self._gives = self._by_stage(schedule)
        self._runnable = deque(range(schedule.num_ranks))
        self._queues: dict[
            tuple[int, object], deque[Transfer]
        ] = {}  # the transfers that each end has posted
        self._sends: dict[Transfer, tuple[int, Action]] = {}  # position and action of its send

    def _by_stage(self, schedule: Schedule) -> tuple[_Numbers, _Numbers]:
        """The inputs and results of microbatch 0, by kind and stage.

        The numbers of microbatch i are larger by i, so a walk looks these up and adds i.
        """
        values, placement = self._values, schedule.placement
        needs, gives = _Numbers(), _Numbers()
        for kind in Kind:
            needs[kind], gives[kind] = [], []
            for stage, rank in enumerate(placement):
                first = Action(kind=kind, microbatch=0, stage=stage)
                needed, result = values.needed(first), values.result(first)
                is_far = [
                    schedule.is_lowered and placement[values.stage(v)] != rank for v in needed
                ]
                needs[kind].append(
                    tuple(v + values.count * far for v, far in zip(needed, is_far, strict=True))
                )
                gives[kind].append(() if result is None else (result,))
        return needs, gives

    def run(self) -> Iterator[Moment]:
        """All moments, until every list is at its end."""
        orders, positions, lowered = self._schedule.orders, self._positions, self._lowered
        # One loop without calls, because hundreds of thousands of computations pass here.
        available, waiting, runnable = self._available, self._waiting, self._runnable
        needs, gives = self._needs, self._gives
        while runnable:
            rank = runnable.popleft()
            order = orders[rank]
            for index in range(positions[rank], len(order)):
                item = order[index]
                parts = (item,) if isinstance(item, Action) else item.parts
                missing = None
                is_end = lowered and item.kind in TRANSFER
                if is_end:
                    yield from self._exchange(rank, index, parts[0])
                    missing = self._missing_for_send(parts[0])
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
        if any(head < len(order) for head, order in zip(positions, orders, strict=True)):
            raise ScheduleError(self._describe_deadlock())

    def _missing_for_send(self, action: Action) -> int | None:
        """The number that a send waits for: its value, then its arrival; None if it is done."""
        if action.kind not in SENDS:
            return None
        value = transfer_of(action, self._schedule, self._values).value
        numbers = value, self._values.count + value
        return next((number for number in numbers if not self._available[number]), None)

    def _exchange(self, rank: int, index: int, action: Action) -> Iterator[Moment]:
        """Post one end of a transfer, once, and make all transfers that became possible."""
        transfer = transfer_of(action, self._schedule, self._values)
        if action.kind in SENDS:
            if transfer in self._sends or not self._available[transfer.value]:
                return
            self._sends[transfer] = index, action
        else:
            yield rank, index, action, transfer
        self._queue(rank, transfer).append(transfer)
        fronts = [transfer]
        while fronts:
            front = fronts.pop()
            ends = [self._queue(end, front) for end in (front.src, front.dst)]
            if not all(queue and queue[0] == front for queue in ends):
                continue
            for queue in ends:
                queue.popleft()
                fronts.extend(list(queue)[:1])
            position, send = self._sends[front]
            yield front.src, position, send, front
            number = self._values.count + front.value
            self._available[number] = 1
            self._runnable.extend(self._waiting.pop(number, ()))

    def _queue(self, rank: int, transfer: Transfer) -> deque[Transfer]:
        """The transfers that ``rank`` has posted on the channel of ``transfer``."""
        name: object = {
            Channel.IDEAL: transfer,
            Channel.PAIR: transfer.pair(),
            Channel.RANK: None,
        }[self._channel]
        return self._queues.setdefault((rank, name), deque())

    def _describe_deadlock(self) -> str:
        """The cycle of ranks that wait for one another, as text."""
        orders, path = self._schedule.orders, list[int]()
        rank: int | None = next(r for r, o in enumerate(orders) if self._positions[r] < len(o))
        rows: list[str] = []
        while rank is not None and rank not in path:
            path.append(rank)
            text, rank = self._describe_wait(rank)
            rows.append(text)
        first = path.index(rank) if rank is not None else 0
        return "no rank can go on:\n" + "\n".join(f"  {row}" for row in rows[first:])

    def _describe_wait(self, rank: int) -> tuple[str, int | None]:
        """The value that a rank waits for, as text, and the rank that it waits for."""
        index = self._positions[rank]
        item, values = self._schedule.orders[rank][index], self._values
        missing = next(number for number, ranks in self._waiting.items() if rank in ranks)
        start = f"rank {rank}, index {index}: {item} waits for "
        value = missing % values.count
        owner = self._schedule.placement[values.stage(value)]
        if missing < values.count or not self._available[value]:
            there = self._position_of(owner, value)
            if there is None:
                return f"{start}{values.text(value)}, which is in no list", None
            if self._positions[owner] >= len(self._schedule.orders[owner]):
                return f"{start}{values.text(value)}, which rank {owner} does not send", None
            return f"{start}{values.text(value)} of rank {owner}, index {there}", owner
        peers = [r for r in range(self._schedule.num_ranks) if self._has_transfer_of(r, value)]
        peer = next((r for r in peers if r != rank), None)
        what = f"the transfer of {values.text(value)}"
        if peer is None:
            return f"{start}{what}, which no other rank posts", None
        return f"{start}{what} with rank {peer}", peer

    def _has_transfer_of(self, rank: int, value: int) -> bool:
        """Whether an end of the transfer of ``value`` is in the list of ``rank``."""
        return any(
            isinstance(item, Action)
            and item.kind in TRANSFER
            and transfer_of(item, self._schedule, self._values).value == value
            for item in self._schedule.orders[rank]
        )

    def _position_of(self, rank: int, value: int) -> int | None:
        """The position in the list of ``rank`` at which a value is computed."""
        for index, item in enumerate(self._schedule.orders[rank]):
            if any(self._values.result(part) == value for part in item.parts):
                return index
        return None
