"""The sends of a step, whose memory is freed as soon as a later message proves that they arrived.

::

    rank 1 |          1F3  ... 1B2  1SEND_B2            [1] 1F3 uses 0SEND_F3 before 1SEND_B2
    rank 0 | ... 0SEND_F3 ...................... 0B2    [2] has 1SEND_B2, so 0SEND_F3 has arrived

The schedule alone proves that. Some transports can only block in the wait for a send, and polling
it takes a helper thread. With this table the executor waits when the wait returns at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

from echelon.pipeline.link import PendingSend
from echelon.pipeline.schedules.ir import BACKWARD, FORWARD, INPUT, Action, Kind, Schedule

_Key = tuple[int, int]  # stage, microbatch


@dataclass(slots=True)
class SendCompletion:
    """The sends of a rank that are complete when a message arrives, by stage and microbatch of it.

    Attributes:
        by_input: for a message that is the input of the stage.
        by_gradient: for a message that is the gradient of the output of the stage.
    """

    by_input: dict[_Key, list[Action]] = field(default_factory=lambda: defaultdict(list))
    by_gradient: dict[_Key, list[Action]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> SendCompletion:
        """The sends of ``rank`` that each message to it proves complete, in a lowered schedule.

        Example:
            >>> from echelon.pipeline.schedules.passes import lower
            >>> from echelon.pipeline.schedules.families import schedule
            >>> completion = SendCompletion.of(lower(schedule("1f1b", 2, 3, 2)), 0)
            >>> {key: list(map(str, sends)) for key, sends in completion.by_gradient.items()}
            {(0, 0): ['0SEND_F0'], (0, 1): ['0SEND_F1'], (0, 2): ['0SEND_F2']}
        """
        completion = cls()
        rank_of = dict(enumerate(schedule.placement)).get
        for peer, order in enumerate(schedule.orders):
            used: list[Action] = []  # our sends that the peer used since its last message to us
            for action in (part for item in order if peer != rank for part in item.parts):
                kind, mb, stage = action
                if mb is None:
                    continue
                if kind is FORWARD and rank_of(stage - 1) == rank:
                    used.append(Action(kind=Kind.SEND_F, microbatch=mb, stage=stage - 1))
                elif kind in (BACKWARD, INPUT) and rank_of(stage + 1) == rank:
                    used.append(Action(kind=Kind.SEND_B, microbatch=mb, stage=stage + 1))
                elif kind is Kind.SEND_F and rank_of(stage + 1) == rank:
                    completion.by_input[stage + 1, mb] += used
                    used = []
                elif kind is Kind.SEND_B and rank_of(stage - 1) == rank:
                    completion.by_gradient[stage - 1, mb] += used
                    used = []
        return completion


@final
class PendingSends:
    """The sends of one step on this rank that may not be complete, the oldest first.

    Args:
        max_unpolled: from this many pending sends on they are polled, which may take a thread.
    """

    def __init__(self, max_unpolled: int) -> None:
        self._max_unpolled = max_unpolled
        self._sends: dict[Action, PendingSend] = {}

    def add(self, action: Action, send: PendingSend) -> None:
        """Release the oldest sends that are complete, and remember this one."""
        sends = self._sends
        while sends:
            oldest = next(iter(sends))
            if not sends[oldest].is_done(poll=len(sends) >= self._max_unpolled):
                break
            sends.pop(oldest).wait()
        sends[action] = send

    def release(self, arrived: Iterable[Action]) -> None:
        """Free the memory of sends that are known to have arrived."""
        for action in arrived:
            send = self._sends.pop(action, None)
            if send is not None:
                send.wait()

    def wait(self) -> None:
        """Wait for all of them."""
        for send in self._sends.values():
            send.wait()

    def forget(self) -> None:
        """Drop all of them without waiting, as after a step that has failed."""
        self._sends = {}
