"""Communications of simulated ranks that are not complete yet: which ranks each of them needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch import Tensor

from echelon.diagnosis.collective_call import CollectiveCall


def _do_nothing(pending: Any) -> None:
    """Of a communication in which nothing moves."""


class Pending:
    """A communication that is complete when all its ranks have joined it.

    Attributes:
        carry_out: does what they have joined it for; called with the communication.
        is_started: whether that was done, or is being done.
    """

    carry_out: Callable[[Any], None] = staticmethod(_do_nothing)
    is_started = False

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = tuple(expected)  # ranks in the job
        self.absent = set(expected)  # those that have not joined
        self.complete = False
        self.error: Exception | None = None
        self.came_ns = 0  # when the last rank joined it, if ranks take turns


@final
class PendingCondition(Pending):
    """Something that any other rank may bring about, such as a key in a store.

    Args:
        rank: that waits for it, in the job.
        others: all other ranks.
        ready: whether it is there.
        missing: the ranks that would have to do something, as far as that is known.
    """

    def __init__(
        self,
        rank: int,
        others: Sequence[int],
        ready: Callable[[], bool],
        missing: Callable[[], set[int]] | None,
    ) -> None:
        super().__init__((rank,))
        self.others = frozenset(others)
        self.ready = ready
        self._missing = missing

    @property
    def absent(self) -> set[int]:
        """The ranks that have not done what they should, or all others."""
        return set(self.others) if self._missing is None else self._missing()

    @absent.setter
    def absent(self, ranks: set[int]) -> None:
        """What is missing follows from the condition."""


class PendingCollective(Pending):
    """A collective: the call and the item of each rank, in rank order.

    Places of absent ranks hold the call and the item of the first rank that joined.
    """

    def __init__(self, ranks: Sequence[int], call: CollectiveCall, item: Any) -> None:
        super().__init__(ranks)
        self.calls: list[CollectiveCall] = [call] * len(self.expected)
        self.items: list[Any] = [item] * len(self.expected)


class PendingMessage(Pending):
    """A message: a send and a receive that match; ``sides`` is by the op of the call."""

    def __init__(self, expected: Sequence[int]) -> None:
        super().__init__(expected)
        self.sides: dict[str, MessageSide] = {}


class MessageSide(NamedTuple):
    """The send or the receive of a message; ``rank`` is in the group."""

    rank: int
    call: CollectiveCall
    tensor: Tensor
    tag: int


@final
@dataclass(slots=True)
class RankWait:
    """One thread of a rank that waits."""

    pending: Pending
    call: CollectiveCall
    has_own_timeout: bool
