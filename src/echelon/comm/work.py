"""Things that a group hands out: work under way, and windows into the peers' memory."""

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
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import RankError, UnsupportedError
from echelon.process.forks import mark, refused


class Work(ABC):
    """Communication under way. Its tensors must not be touched before ``wait`` returns.

    Abstract: a backend writes ``_wait`` and ``done``.
    """

    def __init__(self, call: CollectiveCall) -> None:
        self.call = call
        self._finish: list[Callable[[], None]] = []
        self._mark = mark()

    @final
    def wait(self, timeout: float | None = None) -> None:
        """Return when the result is there, on CUDA in the order of the current stream.

        Args:
            timeout: seconds; None means the timeout of the world. May be called again after it
            passed.

        Raises:
            CommError: the ranks disagree, one failed, all wait for one another, or time is up.
            StateError: this process was forked after the work was issued.
        """
        if self._mark is not mark():
            raise refused(f"the wait for {self.call}", self.call.rank)
        start_s = time.perf_counter()
        self._wait(timeout)
        if self._finish:
            finish, self._finish = self._finish, []
            for step in finish:
                step()
        if events.listening():
            seconds = time.perf_counter() - start_s
            _emit("collective.wait", self.call, start_s, seconds)

    @abstractmethod
    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""

    @abstractmethod
    def _wait(self, timeout: float | None) -> None:
        """Block until complete; raise what went wrong. Must allow a second call."""

    @final
    def then(self, step: Callable[[], None]) -> None:
        """Run ``step`` once, on the thread that waits, when the result is there."""
        self._finish.append(step)


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
    """Tell listeners that a call was issued."""
    _emit("collective.issue", call)


@final
@dataclass(slots=True, weakref_slot=True)
class Window:
    """Memory of every rank of a group that its peers can read and write in place.

    Who may touch what when is up to the ranks: between two barriers of the group (or two
    collectives on the window) a region has one writer, or only readers.

    Attributes:
        local: this rank's region. 1D
        regions: all ranks' regions in rank order; only ``local`` where memory is not shared.
        shared: whether peers can reach it.
        release: gives the memory back; called once, at the latest when the window is dropped.
    """

    local: Tensor
    regions: Sequence[Tensor]
    shared: bool
    release: Callable[[], None] = field(default=lambda: None, repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, self.release).atexit = False  # one that is dropped is closed

    @property
    def numel(self) -> int:
        """Length of each rank's region, in elements."""
        return self.local.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Element type, the same for all ranks."""
        return self.local.dtype

    def peer(self, rank: int) -> Tensor:
        """The region of ``rank`` (in the group), 1D.

        Raises:
                RankError: there is no such rank.
            UnsupportedError: this backend has no shared memory.
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
        """Give the memory back once no tensor of it is used any more."""
        self.release()
