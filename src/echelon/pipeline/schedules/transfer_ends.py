"""The transfers of lists by number, where their two ends stand, and what each rank issues at once.

A send and its receive are the two ends of one transfer, by the name of the value. Which rank holds
which stage does not matter here, so excerpts are read as well as whole lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from echelon.pipeline.schedules.action_lists import ActionLists
from echelon.pipeline.schedules.ir import (
    BACKWARD,
    FORWARD,
    INPUT,
    SENDS,
    TRANSFER,
    Action,
    Item,
    Kind,
)


class TransferEnd(NamedTuple):
    """One end of a transfer: the rank, and the position of the action in its list."""

    rank: int
    position: int


class IssuedEntry(NamedTuple):
    """What a rank does without a pause: an action, or a batch of sends and receives.

    Attributes:
        position: that of its first action.
        needs: the transfers that must be through before it runs.
        posts: the ends of transfers that it posts.
        holds: the transfers that must be through before the rank goes on.
    """

    position: int
    needs: tuple[int, ...]
    posts: tuple[int, ...]
    holds: tuple[int, ...]


_ValueName = tuple[bool, int, int]  # is forward, stage that sends, microbatch


class TransferTable:
    """The transfers of the lists by number, and their two ends.

    In lists without sends and receives the producer of a value is one end, and the other is posted
    from the start. In an excerpt, a transfer of which one end is left out is no transfer.
    """

    def __init__(self, lists: ActionLists) -> None:
        self.explicit = lists.has_transfers
        sends: dict[_ValueName, TransferEnd] = {}
        receives: dict[_ValueName, TransferEnd] = {}
        for rank, order in enumerate(lists.orders):
            for index, item in enumerate(order):
                for part in item.parts:
                    self._note(part, TransferEnd(rank, index), sends, receives)
        self.numbers: dict[_ValueName, int] = {}
        self.sent: list[TransferEnd] = []
        self.received: list[TransferEnd] = []
        for key, end in sends.items():
            other = receives.get(key)
            if other is not None and other.rank != end.rank:
                self.numbers[key] = len(self.sent)
                self.sent.append(end)
                self.received.append(other)

    def _note(
        self,
        part: Action,
        end: TransferEnd,
        sends: dict[_ValueName, TransferEnd],
        receives: dict[_ValueName, TransferEnd],
    ) -> None:
        kind, i, stage = part
        if i is None:
            return
        if self.explicit:
            if kind is Kind.SEND_F:
                sends[True, stage, i] = end
            elif kind is Kind.RECV_F:
                receives[True, stage - 1, i] = end
            elif kind is Kind.SEND_B:
                sends[False, stage, i] = end
            elif kind is Kind.RECV_B:
                receives[False, stage + 1, i] = end
        elif kind is FORWARD:
            sends[True, stage, i] = end
            receives[True, stage - 1, i] = end
        elif kind is BACKWARD or kind is INPUT:
            sends[False, stage, i] = end
            receives[False, stage + 1, i] = end

    def entries(
        self, order: Sequence[Item], batches: Sequence[int | None], hold: bool
    ) -> list[IssuedEntry]:
        """What a rank does, without what neither waits nor is waited for."""
        entries: list[IssuedEntry] = []
        open_batch: int | None = None
        for index, item in enumerate(order):
            if item.kind in TRANSFER:
                number = self.numbers.get(_key(item.parts[0]))
                if number is None:
                    continue
                holds = (number,) if hold and item.kind in SENDS else ()
                if batches[index] is not None and batches[index] == open_batch:
                    last = entries.pop()
                    entry = IssuedEntry(
                        last.position, (), (*last.posts, number), (*last.holds, *holds)
                    )
                else:
                    entry = IssuedEntry(index, (), (number,), holds)
                open_batch = batches[index]
                entries.append(entry)
                continue
            open_batch = None
            needs = tuple(self._numbers(_needed(part) for part in item.parts))
            gives = () if self.explicit else tuple(self._numbers(map(_given, item.parts)))
            if needs or gives:
                entries.append(IssuedEntry(index, needs, gives, ()))
        return entries

    def _numbers(self, keys: Iterable[_ValueName | None]) -> list[int]:
        numbers = [self.numbers.get(key) for key in keys if key is not None]
        return [number for number in numbers if number is not None]

    def other_end(self, number: int, rank: int) -> TransferEnd:
        """The end of a transfer that is not on ``rank``."""
        return self.received[number] if self.sent[number].rank == rank else self.sent[number]

    def end_on(self, number: int, rank: int) -> TransferEnd:
        """The end of a transfer on ``rank``."""
        return self.sent[number] if self.sent[number].rank == rank else self.received[number]


def _key(action: Action) -> _ValueName:
    """The value of a send or a receive."""
    kind, i, stage = action
    forward = kind is Kind.SEND_F or kind is Kind.RECV_F
    step = 0 if kind in SENDS else (-1 if forward else 1)
    return forward, stage + step, i or 0


def _needed(part: Action) -> _ValueName | None:
    """The value of another stage that a computation needs."""
    kind, i, stage = part
    if i is None:
        return None
    if kind is FORWARD:
        return True, stage - 1, i
    if kind is BACKWARD or kind is INPUT:
        return False, stage + 1, i
    return None


def _given(part: Action) -> _ValueName | None:
    """The value for another stage that a computation gives."""
    kind, i, stage = part
    if i is None or kind not in (FORWARD, BACKWARD, INPUT):
        return None
    return kind is FORWARD, stage, i


def crossed_messages(lists: ActionLists) -> str | None:
    """The first message that a receive for another one would take, if messages had no names.

    Example:
        >>> from echelon.pipeline.schedules.action_lists import read
        >>> text = "0F0 0F1 0SEND_F0 0SEND_F1\\n1RECV_F1 1RECV_F0 1F0 1F1"
        >>> print(crossed_messages(read(text)).split(";")[0])
        rank 0 sends 0SEND_F0 (line 1, column 9) where rank 1 receives 1RECV_F1 (line 2, column 1)
    """
    transfers = TransferTable(lists)
    ends = zip(transfers.sent, transfers.received, strict=True)
    sent: dict[tuple[int, int], list[tuple[TransferEnd, TransferEnd]]] = {}
    for send, receive in ends if transfers.explicit else ():
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
