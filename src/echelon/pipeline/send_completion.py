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
from typing import final

from echelon.pipeline.link import PendingSend
from echelon.pipeline.schedules.dataflow import FLOWS, ends_of, receive_before
from echelon.pipeline.schedules.ir import SENDS, TRANSFER, Action, Schedule


def sends_complete_at(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """The sends of ``rank`` that are complete when a message has arrived, by its receive.

    Args:
        schedule: lowered.
        rank: the rank of the sends and of the receives.

    Example:
        >>> from echelon.pipeline.schedules.passes import lower
        >>> from echelon.pipeline.schedules.families import schedule
        >>> complete = sends_complete_at(lower(schedule("1f1b", 2, 3, 2)), 0)
        >>> {str(receive): list(map(str, sends)) for receive, sends in complete.items()}
        {'0RECV_B0': ['0SEND_F0'], '0RECV_B1': ['0SEND_F1'], '0RECV_B2': ['0SEND_F2']}
    """
    complete: dict[Action, list[Action]] = defaultdict(list)
    rank_of = dict(enumerate(schedule.placement)).get
    for peer, order in enumerate(schedule.orders):
        used: list[Action] = []  # our sends that the peer used since its last message to us
        for action in (part for item in order if peer != rank for part in item.parts):
            if action.kind in SENDS:
                _, receive = ends_of(action)
                if rank_of(receive.stage) == rank:
                    complete[receive] += used
                    used = []
            elif action.kind in FLOWS and action.kind not in TRANSFER:
                send, _ = ends_of(receive_before(action))
                if rank_of(send.stage) == rank:
                    used.append(send)
    return complete


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
