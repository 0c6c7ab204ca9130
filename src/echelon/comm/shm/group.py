"""Ranks that are processes of one host, as a ``Group``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, final

import torch
from torch import Tensor

from echelon.comm.derived import Barrier, Gather
from echelon.comm.group import Group
from echelon.comm.ordered_executor import OrderedExecutor
from echelon.comm.primitives import Derived, Primitive, Receive, Send
from echelon.comm.shm.area import Area
from echelon.comm.shm.collectives import METHODS, Collectives
from echelon.comm.shm.mailbox import Mailbox
from echelon.comm.shm.sharing import share_segments
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CommTimeout, RankFailed
from echelon.errors.message_text import message_of

T = TypeVar("T")


@final
class ShmGroup(Group):
    """Local processes that share memory.

    Blocking collectives run on the caller's thread; asynchronous ones in the order of issue on a
    thread of the group, so that they go on while the caller computes.
    """

    overrides = frozenset({Barrier, Gather})

    def __init__(
        self, area: Area, timeout: float, *, on_close: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(
            area.name,
            area.rank,
            area.ranks,
            torch.device("cpu"),
            timeout,
            shares_memory=True,
            note=area.board.monitor.record_call,
        )
        self._area = area
        self._collectives = Collectives(area, timeout)
        # An action itself gives up after the timeout and knows whom it waited for.
        self._executor = OrderedExecutor(
            f"collectives of {area.name}",
            area.absent,
            wait_s=timeout + 10.0,
            stops_at_error=True,
        )
        self._mailbox = Mailbox(area, timeout)
        self._subgroups: list[ShmGroup] = []
        self._num_windows = 0
        self._on_close = on_close
        self._closed = False

    def close(self, failure: BaseException | str | None = None) -> None:
        """End communication: deliver what is outstanding, then tell the others that this rank left.

        Args:
            failure: why this rank leaves early, or what it did; the others raise it, and nothing
                more is delivered.
        """
        if self._closed:
            return
        self._closed = True
        if isinstance(failure, RankFailed):  # the others read of that rank, not of this one
            self._area.board.leave(failure.cause, failure.failed_rank)
        elif isinstance(failure, CommTimeout) and failure.stuck:
            rank, does = next(iter(failure.stuck.items()))
            self._area.board.leave(f"did not come: it {does}", rank)
        elif isinstance(failure, BaseException):
            self._area.board.leave(f"raised {type(failure).__name__}: {message_of(failure)}")
        elif failure is not None:
            self._area.board.leave(failure)
        for subgroup in self._subgroups:
            subgroup.close(failure)
        self._executor.close()
        if failure is None:
            self._mailbox.close()
            self._on_close()
        else:  # the board says already why this rank left
            self._mailbox.abandon()

    def _start(self, call: CollectiveCall, operation: Primitive | Derived) -> Work:
        method = METHODS.get(type(operation))
        if method is not None:
            return self._executor.issue(call, partial(method, self._collectives, call, operation))
        if type(operation) is Send:
            return self._mailbox.send(call, operation.tensor, operation.dst, operation.tag)
        assert type(operation) is Receive
        return self._mailbox.recv(call, operation.tensor, operation.src, operation.tag)

    def _run(self, call: CollectiveCall, make: Callable[[], T]) -> T:
        """Make something together with the other ranks, in its turn among the collectives."""
        made: list[T] = []
        self._executor.issue(call, lambda: made.append(make())).wait()
        return made[0]

    def probe(self, tag: int = 0) -> int | None:
        """A rank that has sent a message with ``tag`` which nobody has asked for yet, or None."""
        return self._mailbox.probe(tag)

    def _subgroup(self, call: CollectiveCall, name: str, members: Sequence[int]) -> ShmGroup | None:
        subgroup = self._run(call, lambda: self._make_subgroup(call, name, members))
        if subgroup is not None:
            self._subgroups.append(subgroup)
        return subgroup

    def _make_subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int]
    ) -> ShmGroup | None:
        """The first member makes the segment; all take part in the rounds."""
        area = self._area
        self._collectives.agree(call)
        nbytes = Area.nbytes(len(members)) if self.rank == members[0] else 0
        segments = share_segments(
            area, call, nbytes, what=f"group {name!r}", timeout=self.timeout, reserve=False
        )
        if self.rank not in members:
            return None
        ranks = [self.ranks[member] for member in members]
        shared = segments[members[0]]
        own = Area(shared, area.board, members.index(self.rank), ranks, name)
        return ShmGroup(own, self.timeout)

    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        return self._run(call, lambda: self._make_window(call, numel, dtype))

    def _make_window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        self._collectives.agree(call)
        nbytes = numel * dtype.itemsize
        what = f"a window of {numel} elements on each of {self.size} ranks"
        segments = share_segments(self._area, call, max(1, nbytes), what=what, timeout=self.timeout)
        with torch.inference_mode(False):  # a window outlives the caller's mode
            regions = tuple(
                segments[rank].tensor(0, nbytes).view(dtype) for rank in range(self.size)
            )
        if numel:
            self._num_windows += 1
            self._collectives.add_window(self._num_windows, regions)
        return Window(
            regions[self.rank], regions, True, lambda: self._collectives.drop_window(regions)
        )

    def _shared(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Tensor:
        return self._run(call, lambda: self._make_shared(call, numel, dtype))

    def _make_shared(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Tensor:
        """Rank 0 makes the segment; all take part in the rounds."""
        self._collectives.agree(call)
        nbytes = numel * dtype.itemsize
        what = f"memory of {numel} elements that {self.size} ranks share"
        own = max(1, nbytes) if self.rank == 0 else 0
        segments = share_segments(self._area, call, own, what=what, timeout=self.timeout)
        with torch.inference_mode(False):  # it outlives the caller's mode
            return segments[0].tensor(0, nbytes).view(dtype)
