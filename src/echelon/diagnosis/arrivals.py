"""When a rank came to its last collectives, and what it had done before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, final

from echelon.diagnosis.step_rows import Activity

if TYPE_CHECKING:
    from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall

NUM_ARRIVALS = 4096  # that are kept


class Arrival(NamedTuple):
    """A rank has come to a collective.

    Attributes:
        group: its name.
        position: of the call in the group.
        call: what it is, and where it is made.
        time_ns: when, on the monotonic clock of the host.
        activity: what the rank had done for longest since its collective before.
    """

    group: str
    position: int
    call: str
    time_ns: int
    activity: Activity


@final
class Arrivals:
    """The last arrivals of one rank.

    To record one costs next to nothing: the text of a call is written when somebody asks for it.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[CollectiveCall, int, int]] = deque(maxlen=NUM_ARRIVALS)
        # Takes a tuple: the call, when the rank came to it, and what it had done before.
        self.add = self._last.append

    def __len__(self) -> int:
        return len(self._last)

    def clear(self) -> None:
        """Forget all of them."""
        self._last.clear()

    def postpone(self, time_ns: int, activity: int) -> None:
        """Note that the rank comes only now to the call that was noted last."""
        call, _, _ = self._last.pop()
        self._last.append((call, time_ns, activity))

    def record(self) -> dict[str, Any]:
        """What ``arrivals_of`` reads, of values that ranks may send to each other."""
        numbers: dict[tuple[CallSignature, CallSite, str], int] = {}
        rows = []
        for call, time_ns, activity in self._last:
            key = call.signature, call.place, call.group
            number = numbers.setdefault(key, len(numbers))
            rows += [number, call.position, time_ns, int(activity)]
        return {
            "groups": [group for *_, group in numbers],
            "calls": [f"{signature} at {place}" for signature, place, _ in numbers],
            "rows": rows,
        }


def arrivals_of(record: Mapping[str, Any]) -> list[Arrival]:
    """The arrivals that ``Arrivals.record`` has told of, the oldest first."""
    groups, calls, rows = record["groups"], record["calls"], record["rows"]
    return [
        Arrival(groups[number], position, calls[number], time_ns, Activity(activity))
        for number, position, time_ns, activity in zip(*[iter(rows)] * 4, strict=True)
    ]
