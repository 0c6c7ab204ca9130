"""How operations of simulated ranks match, and which of them wait for one another.

``RankRules`` are those of gloo, and of simulated ranks by default: messages match by their tags,
and no operation waits for another one.

``OneQueue`` has the rules of NCCL, where it is strictest::

    rank 0   [send to 1] <- [all-reduce] <- [recv from 1]        one queue for each rank: what is
    rank 1   [send to 0] <- ...                                  not at its head does not run

- Messages of two ranks match in the order of issue. There are no tags.
- The first unbatched message of two ranks makes a communicator of both, and the first collective or
  batch of a group one of all its ranks. It holds the hosts of these ranks until all have come.
  So a message within a batch and one outside of any never match.
- An operation runs when it is at the head of the queues of all its ranks. NCCL has such a queue for
  each communicator; a process group that was made with a ``device_id`` has one for all messages of
  a rank, and NCCL asks for one order of all communicators on all ranks.
- A batch of messages is one operation: those within it do not wait for one another.

Law: a program that ends under these rules has no circle of waits under NCCL.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import final

from echelon.comm.threads.pending import Pending
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors.message_text import ranks_text

_PAIR = "pair of "  # before the name of a group, in the key of a communicator


class RankRules:
    """Messages match by their tags; an operation runs when all its ranks have issued it.

    The caller of a method holds the world's lock.

    Args:
        shares_memory: whether a rank reaches the windows of others.

    Attributes:
        has_tags: whether messages match by their tags, and not by the order of issue.
        has_queues: whether operations wait for those that were issued before them.
    """

    has_tags = True
    has_queues = False

    def __init__(self, *, shares_memory: bool = True) -> None:
        self.shares_memory = shares_memory

    def of_host(self) -> RankRules:
        """The rules of groups that communicate on the host, beside those on a device."""
        return self

    def issued(self, pending: Pending, call: CollectiveCall) -> Sequence[Pending]:
        """Record that a rank has joined an operation; what can be carried out now."""
        return () if pending.absent else (pending,)

    def completed(self, pending: Pending) -> Sequence[Pending]:
        """Record that an operation is complete; what can be carried out now."""
        return ()

    def able(self, going: set[int]) -> Callable[[Pending], bool]:
        """Which operations may be complete one day, if only these ranks issue more."""
        return lambda pending: pending.absent <= going

    def communicator(
        self, group: str, ranks: Sequence[int], pair: tuple[int, int] | None, rank: int
    ) -> Pending | None:
        """What holds a rank, before its operation, until others have come; None if nothing does.

        Args:
            group: the name of the group.
            ranks: of the group, in the job.
            pair: the ranks of a message, in the job; None for a collective.
            rank: that issues the operation.
        """
        return None

    def queued(self, group: str) -> Sequence[Pending]:
        """What ranks of a group wait for beside operations that some have not joined."""
        return ()

    def channel(self, tag: int, rank: int) -> int:
        """What a message that a rank issues now has in common with those that it can match."""
        return tag

    def left(self) -> Mapping[int, tuple[Pending, CollectiveCall]]:
        """By rank, the first operation that it has issued and that is not complete."""
        return {}

    def begin_batch(self, rank: int) -> None:
        """Let the messages that a rank issues from now on be one operation."""
        return

    def end_batch(self, rank: int) -> Sequence[Pending]:
        """End that operation; what can be carried out now."""
        return ()

    def holders(self, pending: Pending) -> set[int]:
        """The ranks in whose queues an operation waits for another one."""
        return set()

    def reason(self, pending: Pending) -> str:
        """Why a wait needs others, beside that they are absent; for a report."""
        return ""


def _place(rank: int) -> tuple[int, int]:
    """Who issues a batch: another thread of the rank issues what is none of it."""
    return rank, threading.get_ident()


class _Launch:
    """What a rank issues as one operation: a collective, a message, or a batch of messages."""

    __slots__ = ("is_batch", "is_open", "is_queued", "parts")

    def __init__(self, *, is_batch: bool = False) -> None:
        self.parts: dict[Pending, CollectiveCall] = {}  # that are not complete
        self.is_batch = self.is_open = is_batch
        self.is_queued = False


@final
class OneQueue(RankRules):
    """The rules of NCCL: order instead of tags, first uses that block, one queue for each rank.

    Args:
        size: the number of ranks.
    """

    has_tags = False
    has_queues = True

    def __init__(self, size: int) -> None:
        super().__init__(shares_memory=False)
        self._queues: list[deque[_Launch]] = [deque() for _ in range(size)]
        self._batches: dict[tuple[int, int], _Launch] = {}  # by the rank, and its thread
        self._communicators: dict[tuple[str, tuple[int, ...]], Pending] = {}
        self._places: dict[Pending, dict[int, _Launch]] = {}  # by operation and rank
        self._of_host = RankRules(shares_memory=False)
        self._free_ns = [0] * size  # when the last operation of a rank was complete

    def of_host(self) -> RankRules:
        """Those of gloo."""
        return self._of_host

    def communicator(
        self, group: str, ranks: Sequence[int], pair: tuple[int, int] | None, rank: int
    ) -> Pending | None:
        """See ``RankRules``."""
        is_pair = pair is not None and _place(rank) not in self._batches
        members = tuple(sorted(pair)) if pair is not None and is_pair else tuple(ranks)
        key = (_PAIR if is_pair else "") + group, members
        made = self._communicators.get(key)
        if made is None:
            made = self._communicators[key] = Pending(members)
        return None if made.complete else made

    def issued(self, pending: Pending, call: CollectiveCall) -> Sequence[Pending]:
        """See ``RankRules``."""
        launch = self._batches.get(_place(call.rank)) or _Launch()
        if not launch.is_queued:  # a batch comes with its first message, which no first use holds
            launch.is_queued = True
            self._queues[call.rank].append(launch)
        launch.parts[pending] = call
        self._places.setdefault(pending, {})[call.rank] = launch
        return self._runnable([pending])

    def completed(self, pending: Pending) -> Sequence[Pending]:
        """See ``RankRules``."""
        places = self._places.pop(pending, {})
        for rank, launch in places.items():
            launch.parts.pop(pending, None)
            self._free_ns[rank] = max(self._free_ns[rank], pending.came_ns)
        return self._advance(places)

    def begin_batch(self, rank: int) -> None:
        """See ``RankRules``."""
        self._batches[_place(rank)] = _Launch(is_batch=True)

    def end_batch(self, rank: int) -> Sequence[Pending]:
        """See ``RankRules``."""
        launch = self._batches.pop(_place(rank), None)
        if launch is not None:
            launch.is_open = False
        return self._advance([rank])

    def queued(self, group: str) -> Sequence[Pending]:
        """See ``RankRules``."""
        operations = [
            pending
            for pending, places in self._places.items()
            if any(launch.parts[pending].group == group for launch in places.values())
        ]
        made = self._communicators.items()
        first_uses = [p for (name, _), p in made if name.removeprefix(_PAIR) == group]
        return [*operations, *(each for each in first_uses if not each.complete)]

    def channel(self, tag: int, rank: int) -> int:
        """See ``RankRules``."""
        return int(_place(rank) in self._batches)

    def left(self) -> Mapping[int, tuple[Pending, CollectiveCall]]:
        """See ``RankRules``."""
        heads = {rank: queue[0].parts for rank, queue in enumerate(self._queues) if queue}
        return {rank: next(iter(parts.items())) for rank, parts in heads.items() if parts}

    def _advance(self, ranks: Sequence[int] | dict[int, _Launch]) -> Sequence[Pending]:
        """Take what is complete from the heads of queues; what can run now."""
        candidates: dict[Pending, None] = {}
        for rank in ranks:
            queue = self._queues[rank]
            while queue and not queue[0].parts and not queue[0].is_open:
                queue.popleft()
            if queue:
                candidates |= dict.fromkeys(queue[0].parts)
        return self._runnable(list(candidates))

    def _runnable(self, candidates: Sequence[Pending]) -> Sequence[Pending]:
        """Those that all ranks have joined, and that are at the heads of all their queues."""
        runnable = []
        for pending in candidates:
            places = self._places[pending]
            if pending.absent or pending.is_started:
                continue
            if all(self._queues[rank][0] is launch for rank, launch in places.items()):
                pending.is_started = True
                pending.came_ns = max([pending.came_ns, *(self._free_ns[rank] for rank in places)])
                runnable.append(pending)
        return runnable

    def able(self, going: set[int]) -> Callable[[Pending], bool]:
        """See ``RankRules``. The queues are run on paper."""
        queues = [list(queue) for queue in self._queues]
        heads, done = [0] * len(queues), set[Pending]()

        def is_head(rank: int, launch: _Launch | None) -> bool:
            queue, head = queues[rank], heads[rank]
            first = queue[head] if head < len(queue) else None
            return first is launch or (launch is None and first is not None and first.is_open)

        def runs(pending: Pending) -> bool:
            if not pending.absent <= going:
                return False
            places = self._places[pending]
            # A rank that has not issued it will do so behind all that is in its queue.
            return all(is_head(rank, places.get(rank)) for rank in pending.expected)

        has_moved = True
        while has_moved:
            has_moved = False
            for rank, queue in enumerate(queues):
                while heads[rank] < len(queue):
                    parts = [part for part in queue[heads[rank]].parts if part not in done]
                    ready = [part for part in parts if runs(part)]
                    done.update(ready)
                    if len(ready) < len(parts):
                        has_moved = has_moved or bool(ready)
                        break
                    heads[rank] += 1
                    has_moved = True
        return lambda p: p in done if p in self._places else p.absent <= going

    def holders(self, pending: Pending) -> set[int]:
        """See ``RankRules``."""
        places = self._places.get(pending, {})
        return {rank for rank, launch in places.items() if self._queues[rank][0] is not launch}

    def reason(self, pending: Pending) -> str:
        """See ``RankRules``."""
        key = next((key for key, made in self._communicators.items() if made is pending), None)
        if key is not None:
            kind = "pair" if key[0].startswith(_PAIR) else "group"
            return f"its first use of a {kind} holds {ranks_text(key[1])} until all have come"
        for rank in sorted(self.holders(pending)):
            for head, call in self._queues[rank][0].parts.items():
                absent = f", not joined by {ranks_text(sorted(head.absent))}" if head.absent else ""
                return f"it is queued on rank {rank} behind {call}{absent}"
        return self._other_channel(pending)

    def _other_channel(self, pending: Pending) -> str:
        """That the other side of a message is in a batch, and this one is not, or the reverse."""
        for rank, launch in self._places.get(pending, {}).items():
            call = launch.parts[pending]
            for other, places in self._places.items():
                if other.expected != pending.expected or rank in places:
                    continue
                for peer, place in places.items():
                    if place.is_batch is launch.is_batch or place.parts[other].group != call.group:
                        continue
                    here, there = (
                        ("inside", "outside") if launch.is_batch else ("outside", "inside")
                    )
                    return (
                        f"it is {here} of a batch_isend_irecv, and {place.parts[other]} of rank "
                        f"{peer} is {there} of one: NCCL carries these by two communicators"
                    )
        return ""
