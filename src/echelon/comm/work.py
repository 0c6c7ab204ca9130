"""The results of calls of a group: outstanding communication, and windows of shared memory."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from echelon import events
from echelon.comm.profiler_spans import profiler_runs, profiler_span
from echelon.diagnosis import rank_time
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import RankError, UnsupportedError
from echelon.process.forks import mark, refused


class Work(ABC):
    """Communication that is under way, like ``torch.distributed.Work``.

    Do not touch the tensors of the call before ``wait`` returns. A backend implements ``_wait``
    and ``done``.

    Attributes:
        call: the call that started the communication.
    """

    _finish: Sequence[Callable[[], None]] = ()  # most calls have none

    def __init__(self, call: CollectiveCall) -> None:
        self.call = call
        self._fork_mark = mark()

    @final
    def wait(self, timeout: float | None = None) -> None:
        """Return when the result can be used; on CUDA, let the current stream wait for it.

        Args:
            timeout: in seconds; None means the timeout of the world. After a ``CommTimeout`` the
                work may be waited for again.

        Raises:
            CommError: ranks disagree, failed, wait for each other, or did not come in time.
            StateError: this process was forked after the work was issued.
        """
        if self._fork_mark is not mark():
            raise refused(f"the wait for {self.call}", self.call.rank)
        clock = None if self._is_over() and not self._finish else rank_time.current()
        before = rank_time.NOTHING if clock is None else clock.begin_call()
        try:
            if not profiler_runs():
                self.complete(timeout)
                return
            with profiler_span("wait", self.call.signature, self.call.group):
                self.complete(timeout)
        finally:
            if clock is not None:
                clock.end(before)

    @final
    def complete(self, timeout: float | None = None) -> None:
        """Wait without beginning a measurement or a span of the profiler: the caller has."""
        start_s = time.perf_counter() if events.listening() else None
        self._wait(timeout)
        if self._finish:
            finish, self._finish = self._finish, ()
            for step in finish:
                step()
        if start_s is not None:
            _emit("collective.wait", self.call, start_s, time.perf_counter() - start_s)

    @abstractmethod
    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""

    def _is_over(self) -> bool:
        """Whether the communication is known to have ended, without polling the backend."""
        return False

    @abstractmethod
    def _wait(self, timeout: float | None) -> None:
        """Block until the communication is complete, or raise its error; may be called twice."""

    @final
    def then(self, step: Callable[[], None]) -> None:
        """Run ``step`` once, on the thread that waits, when the result can be used."""
        self._finish = (*self._finish, step)


@final
class CompletedWork(Work):
    """A call that was complete when it was issued."""

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return True

    def _wait(self, timeout: float | None) -> None:
        pass


def finish_call(call: CollectiveCall, finish: Sequence[Callable[[], None]]) -> None:
    """What ``Work.wait`` does for a blocking call that has ended without a work."""
    start_s = time.perf_counter()
    for step in finish:
        step()
    _emit("collective.wait", call, start_s, time.perf_counter() - start_s)


def _emit(
    name: str, call: CollectiveCall, start_s: float | None = None, seconds: float = 0.0
) -> None:
    signature = call.signature
    events.emit(
        name,
        start_s,
        seconds,
        rank=call.rank,
        group=call.group,
        op=signature.op,
        position=call.position,
        nbytes=signature.nbytes,
        label=signature.label,
        root=signature.root,
    )


def emit_issue(call: CollectiveCall) -> None:
    """Emit the event of a call that was issued."""
    _emit("collective.issue", call)


@final
@dataclass(slots=True, weakref_slot=True)
class Window:
    """Memory of every rank of a group that its peers can read and write in place.

    The ranks must coordinate their accesses: between two barriers of the group (or two collectives
    on the window) a region has either one writer or only readers.

    Attributes:
        local: this rank's region, 1D.
        regions: all ranks' regions in rank order; only ``local`` if memory is not shared.
        shared: whether peers can reach the regions.
        release: frees the memory; it is called at the latest when the window is deleted.
    """

    local: Tensor
    regions: Sequence[Tensor]
    shared: bool
    release: Callable[[], None] = field(default=lambda: None, repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, self.release).atexit = False

    @property
    def numel(self) -> int:
        """The number of elements of each rank's region."""
        return self.local.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the regions, which is the same on all ranks."""
        return self.local.dtype

    def peer(self, rank: int) -> Tensor:
        """Return the region of ``rank``, a rank in the group. 1D.

        Raises:
            RankError: the group has no such rank.
            UnsupportedError: the group does not share memory.
        """
        if not isinstance(rank, int) or (self.shared and not 0 <= rank < len(self.regions)):
            raise RankError("the peer", rank, len(self.regions))
        if not self.shared:
            raise UnsupportedError(
                "this group has no shared memory, so a window holds the local region only: "
                "use collectives, or a world of threads or processes"
            )
        return self.regions[rank]

    def close(self) -> None:
        """Free the memory once no tensor of it is used any more."""
        self.release()
