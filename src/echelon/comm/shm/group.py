"""Ranks that are processes of one host, as a ``Group``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, final

import torch
from torch import Tensor

from echelon.comm.derived import Barrier, Gather, Scatter
from echelon.comm.group import Group
from echelon.comm.ordered_executor import OrderedExecutor
from echelon.comm.primitives import Derived, Primitive, Receive, Send
from echelon.comm.shm.area import Area
from echelon.comm.shm.collectives import METHODS, Collectives
from echelon.comm.shm.mailbox import Mailbox
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CallSignature, CollectiveCall
from echelon.diagnosis.failure_record import cause_of
from echelon.errors import CommTimeout, RankFailed
from echelon.process import time_limits

T = TypeVar("T")

# An action itself raises after the timeout, and knows for which rank it waited.
_BEYOND_S = 10.0


@final
class ShmGroup(Group):
    """Local processes that share memory.

    Blocking collectives run on the caller's thread. Asynchronous ones run on a thread of the group,
    in the order of issue, while the caller computes.
    """

    overrides = frozenset({Barrier, Gather, Scatter})

    def __init__(self, area: Area, *, on_close: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            area.name,
            area.rank,
            area.job_ranks,
            torch.device("cpu"),
            area.timeout,
            shares_memory=True,
            note=area.table.monitor.record_call,
        )
        self._area = area
        self._collectives = Collectives(area)
        self._executor = OrderedExecutor(
            f"collectives of {area.name}",
            lambda: area.table.named(area.absent()),
            wait_s=area.timeout + _BEYOND_S,
            stops_at_error=True,
        )
        self._mailbox = Mailbox(area)
        self._subgroups: list[ShmGroup] = []
        self._num_windows = 0
        self._on_close = on_close
        self._closed = False

    def _use_timeout(self, seconds: float) -> None:
        self._area.timeout, self._executor.wait_s = seconds, seconds + _BEYOND_S

    def close(self, failure: BaseException | str | None = None) -> None:
        """Complete outstanding communication, then leave the group.

        With a ``failure`` (an error, or what this rank did), outstanding messages are dropped and
        the other ranks raise the failure.
        """
        if self._closed:
            return
        self._closed = True
        if isinstance(failure, RankFailed):  # the errors of other ranks name the rank at fault
            self._area.table.leave(failure.cause, failure.failed_rank)
        elif isinstance(failure, CommTimeout) and failure.stuck:
            rank, does = next(iter(failure.stuck.items()))
            self._area.table.leave(f"did not come: it {does}", rank)
        elif isinstance(failure, BaseException):
            self._area.table.leave(cause_of(failure))
        elif failure is not None:
            self._area.table.leave(failure)
        for subgroup in self._subgroups:
            subgroup.close(failure)
        self._end_collectives(failure)
        if failure is None:
            self._mailbox.close()
            self._on_close()
        else:  # the table says already why this rank left
            self._mailbox.abandon()

    def _end_collectives(self, failure: object) -> None:
        """Run outstanding collectives to their end, which their own limits bound."""
        limit_s = self.timeout + _BEYOND_S if failure is None else time_limits.CLOSE_FAILED_WORLD_S
        if not self._executor.close(seconds=limit_s) and failure is None:
            doing = f"the end of group {self.name!r}, with collectives under way,"
            raise CommTimeout(doing, self._executor.awaited(), limit_s)

    def leave(self) -> None:
        """Tell the others that this rank communicates no more; nothing is waited for."""
        if not self._closed:
            self._area.table.leave(None)

    def _start(self, call: CollectiveCall, operation: Primitive | Derived) -> Work | None:
        method = METHODS.get(type(operation))
        if method is not None:
            return self._executor.issue(call, method, self._collectives, call, operation)
        if type(operation) is Send:
            return self._mailbox.send(call, operation.tensor, operation.dst, operation.tag)
        assert type(operation) is Receive
        return self._mailbox.recv(call, operation.tensor, operation.src, operation.tag)

    def _run(self, call: CollectiveCall, make: Callable[[], T]) -> T:
        """Run ``make`` on all ranks, in order with their collectives, and return its result."""
        results: list[T] = []
        work = self._executor.issue(call, lambda: results.append(make()))
        if work is not None:
            work.wait()
        return results[0]

    def probe(self, tag: int) -> int | None:
        """A rank that has sent a message with ``tag`` whose receive is not posted yet, or None."""
        return self._mailbox.probe(tag)

    def wait_until(
        self, signature: CallSignature, ready: Callable[[], bool], rank: int, seconds: float
    ) -> None:
        """Return when something holds that another rank brings about outside of the group.

        Whoever brings it about calls ``wake``.

        Raises:
            CommTimeout: it does not hold in time.
            RankFailed: the rank has left or died.
        """
        call = self._number(signature, blocking=True, is_message=True)
        table, missing = self._area.table, [self._area.ranks[rank]]
        try:
            table.wait(ready, lambda: str(call), lambda: missing, seconds)
        except CommTimeout as error:
            raise table.monitor.explained(error) from None

    def wake(self) -> None:
        """Wake ranks of the group that wait until something holds, after it was brought about."""
        area = self._area
        area.table.wake([area.ranks[peer] for peer in area.peers])

    def _subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int], device: torch.device | None
    ) -> ShmGroup | None:
        subgroup = self._run(call, lambda: self._make_subgroup(call, name, members))
        if subgroup is not None:
            self._subgroups.append(subgroup)
        return subgroup

    def _make_subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int]
    ) -> ShmGroup | None:
        """The first member makes the segment; all take part in the rounds."""
        area = self._area
        area.agree(call)
        nbytes = Area.nbytes(len(members)) if self.rank == members[0] else 0
        segments = area.share_segments(call, nbytes, what=f"group {name!r}", reserve=False)
        if self.rank not in members:
            return None
        rank, ranks = members.index(self.rank), [self._area.ranks[member] for member in members]
        return ShmGroup(Area(segments[members[0]], area.table, rank, ranks, name, self.timeout))

    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        return self._run(call, lambda: self._make_window(call, numel, dtype))

    def _make_window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        self._area.agree(call)
        nbytes = numel * dtype.itemsize
        what = f"a window of {numel} elements on each of {self.size} ranks"
        segments = self._area.share_segments(call, max(1, nbytes), what=what)
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
        self._area.agree(call)
        nbytes = numel * dtype.itemsize
        what = f"memory of {numel} elements that {self.size} ranks share"
        local_nbytes = max(1, nbytes) if self.rank == 0 else 0
        segments = self._area.share_segments(call, local_nbytes, what=what)
        with torch.inference_mode(False):  # the tensor outlives the caller's mode
            return segments[0].tensor(0, nbytes).view(dtype)
