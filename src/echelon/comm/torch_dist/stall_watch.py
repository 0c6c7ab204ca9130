"""Watches for calls that a device does not finish, and ends them by name.

[Note: stalled devices]
NCCL's ``wait`` orders a stream and returns, so a rank that does not come is no timeout of a call:
after some minutes NCCL's own watchdog ends the process without a word of the others. So one thread
of each rank looks at the newest call of every group, which is done only when all before it are.
If it is not done in time, the rank asks the others in the store what they have issued, says what
is wrong, and aborts its communicators. The script, which may wait for the device, goes on then, and
its next call raises. A rank that fails in another way has the others look at once.

Other engines wait on the host, and tell by themselves.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, final

from echelon.comm.torch_dist.engines import EngineWork
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.diagnosis.rank_monitor import Store
from echelon.diagnosis.stalled_calls import IssuedCall, Stall, dump, find_stall, load
from echelon.process import time_limits
from echelon.process.background_threads import run_in_background

_NUM_KEPT = 64  # calls of a group that ranks tell one another
_PAUSE_S = 0.05
_KEY = "stalled"  # in the store: a device is waited for in vain


Line = tuple[str, int | None]  # calls that a device carries out in their order
COLLECTIVES: Line = ("", None)


class Started(NamedTuple):
    """A call that a device has been given.

    Attributes:
        works: of the engine; done when the device has carried them out.
        start_s: when it was given, by ``time.monotonic``.
    """

    call: CollectiveCall
    works: Sequence[EngineWork]
    start_s: float


class StalledGroup(Protocol):
    """The members of a group that the watch uses."""

    name: str
    ranks: tuple[int, ...]
    timeout: float

    def end_stall(self, started: Started, stall: Stall) -> None:
        """End the job on this rank because of a stall."""

    def look(self, started: Started) -> None:
        """End the job on this rank if another one has."""


@final
class _Watched:
    """One group, and its calls that may not be done."""

    def __init__(self, group: StalledGroup) -> None:
        self.group = group
        self.issued: deque[CollectiveCall] = deque(maxlen=_NUM_KEPT)  # collectives
        # What is done in the order in which it was given: all collectives, the messages to a peer,
        # those from it. Of each the newest call, and the one that is looked at.
        self.newest: dict[Line, Started] = {}
        self._probes: dict[Line, Started] = {}
        self._done = -1  # the position of the last collective that is known to be done

    def advance(self) -> None:
        """Look which probes are done, and take newer ones in their place."""
        for line, probe in [*self._probes.items()]:
            if all(work.is_completed() for work in probe.works):
                del self._probes[line]
                if line is COLLECTIVES:
                    self._done = probe.call.position
        for line in [*self.newest]:
            if line not in self._probes:
                self._probes[line] = self.newest.pop(line)

    @property
    def oldest(self) -> Started | None:
        """The call that has been looked at for the longest, and is not done."""
        return min(self._probes.values(), key=lambda probe: probe.start_s, default=None)

    def pending(self) -> list[IssuedCall]:
        """The collectives that may not be done."""
        return [IssuedCall.of(call) for call in [*self.issued] if call.position > self._done]


@final
class StallWatch:
    """Watches the groups of one rank whose engines queue; see [Note: stalled devices].

    Args:
        rank: in the job.
        store: shared by all ranks; this object writes ``stalled`` and below ``issued/`` only.
    """

    def __init__(self, rank: int, store: Store) -> None:
        self._rank, self._store = rank, store
        self._groups: dict[str, _Watched] = {}
        self._ended = threading.Event()
        self._has_told = False
        self._lock = threading.Lock()

    def join(self, group: StalledGroup) -> Callable[[CollectiveCall, Sequence[EngineWork]], None]:
        """Watch ``group``; the result is to be called with each call that it starts."""
        watched = _Watched(group)
        with self._lock:
            self._groups[group.name] = watched
            if len(self._groups) == 1:
                run_in_background("echelon stalls", self._run, stop=self.end)

        def add(call: CollectiveCall, works: Sequence[EngineWork]) -> None:
            line, signature = COLLECTIVES, call.signature
            if signature.op in ("send", "recv"):
                line = signature.op, signature.root
            else:
                watched.issued.append(call)
            watched.newest[line] = Started(call, works, time.monotonic())

        return add

    def end(self, *, failed: bool = False) -> None:
        """Watch no more; where this rank has ``failed``, have the others look at once."""
        if failed and self._groups and not self._ended.is_set():
            with suppress(RuntimeError):  # the store is gone
                self._store.set(_KEY, str(self._rank))
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(time_limits.LOOK_FOR_STALLS_S):
            with self._lock:
                watched = [*self._groups.values()]
            self._look(watched)

    def _look(self, groups: Sequence[_Watched]) -> None:
        for watched in groups:
            watched.advance()
        is_asked = self._answer(groups)
        for watched in groups:
            probe = watched.oldest
            if probe is None:
                continue
            if time.monotonic() - probe.start_s > watched.group.timeout:
                watched.group.end_stall(probe, self._find(watched, groups))
                self.end()
                return
            if is_asked:
                watched.group.look(probe)

    def _answer(self, groups: Sequence[_Watched]) -> bool:
        """Whether a rank has asked what the others have issued; tell it once."""
        if not self._has_told:
            with suppress(RuntimeError):  # the store is gone, which the ranks hear by other ways
                if self._store.check([_KEY]):
                    self._tell(groups)
        return self._has_told

    def _tell(self, groups: Sequence[_Watched]) -> None:
        """Tell the others what this rank has issued."""
        self._has_told = True
        issued = {w.group.name: map(IssuedCall.of, [*w.issued]) for w in groups}
        self._store.set(f"issued/{self._rank}", dump(issued))

    def _find(self, watched: _Watched, groups: Sequence[_Watched]) -> Stall:
        """Ask the others, and wait for as long as they take to see it."""
        ranks, name = watched.group.ranks, watched.group.name
        keys = {rank: f"issued/{rank}" for rank in ranks}
        issued: dict[int, list[IssuedCall] | None] = dict.fromkeys(ranks)
        with suppress(RuntimeError):  # the store is gone: nobody answers
            self._store.set(_KEY, str(self._rank))
            self._tell(groups)
            end = time.monotonic() + 2 * time_limits.LOOK_FOR_STALLS_S + time_limits.READ_RECORDS_S
            while not self._store.check([*keys.values()]) and time.monotonic() < end:
                time.sleep(_PAUSE_S)
            for rank, key in keys.items():
                if self._store.check([key]):
                    issued[rank] = load(self._store.get(key), name)
        return find_stall(watched.pending(), issued)
