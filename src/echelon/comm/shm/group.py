"""Ranks that are processes of one host, as a ``Group``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.comm.shm.area import Area
from echelon.comm.shm.collectives import Collectives
from echelon.comm.shm.engine import Engine
from echelon.comm.shm.mailbox import Mailbox
from echelon.comm.shm.sharing import share_segments
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CommTimeout, RankFailed
from echelon.errors.message_text import message_of


@final
class ShmGroup(Group):
    """Local processes that share memory.

    Blocking collectives run on the caller's thread; asynchronous ones in the order of issue on a
    thread of the group, so that they go on while the caller computes.
    """

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
        self._engine = Engine(f"collectives of {area.name}", timeout, area.absent)
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
        self._engine.close()
        if failure is None:
            self._mailbox.close()
            self._on_close()
        else:  # the board says already why this rank left
            self._mailbox.abandon()

    def _run(self, call: CollectiveCall, action: Callable[[], None]) -> Work:
        return self._engine.run(call, action)

    def _all_reduce(self, call: CollectiveCall, tensor: Tensor, op: str) -> Work:
        return self._run(call, lambda: self._collectives.all_reduce(call, tensor, op))

    def _reduce_scatter(
        self, call: CollectiveCall, output: Tensor, input: Tensor, splits: Sequence[int], op: str
    ) -> Work:
        return self._run(
            call, lambda: self._collectives.reduce_scatter(call, output, input, splits, op)
        )

    def _all_gather(self, call: CollectiveCall, outputs: Sequence[Tensor], input: Tensor) -> Work:
        return self._run(call, lambda: self._collectives.all_gather(call, outputs, input))

    def _broadcast(self, call: CollectiveCall, tensor: Tensor, src: int) -> Work:
        return self._run(call, lambda: self._collectives.broadcast(call, tensor, src))

    def _reduce(self, call: CollectiveCall, tensor: Tensor, dst: int, op: str) -> Work:
        return self._run(call, lambda: self._collectives.reduce(call, tensor, dst, op))

    def _gather(
        self, call: CollectiveCall, outputs: Sequence[Tensor], tensor: Tensor, dst: int
    ) -> Work:
        return self._run(call, lambda: self._collectives.gather(call, outputs, tensor, dst))

    def _scatter(
        self, call: CollectiveCall, tensor: Tensor, inputs: Sequence[Tensor], src: int
    ) -> Work:
        return self._run(call, lambda: self._collectives.scatter(call, tensor, inputs, src))

    def _all_to_all(
        self, call: CollectiveCall, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Work:
        return self._run(call, lambda: self._collectives.all_to_all(call, outputs, inputs))

    def _barrier(self, call: CollectiveCall) -> Work:
        return self._run(call, lambda: self._collectives.barrier(call))

    def _send(self, call: CollectiveCall, tensor: Tensor, dst: int, tag: int) -> Work:
        return self._mailbox.send(call, tensor, dst, tag)

    def _recv(self, call: CollectiveCall, tensor: Tensor, src: int, tag: int) -> Work:
        return self._mailbox.recv(call, tensor, src, tag)

    def probe(self, tag: int = 0) -> int | None:
        """A rank that has sent a message with ``tag`` which nobody has asked for yet, or None."""
        return self._mailbox.probe(tag)

    def _subgroup(self, call: CollectiveCall, name: str, members: Sequence[int]) -> Group | None:
        found: list[ShmGroup] = []
        self._run(call, lambda: found.extend(self._make_subgroup(call, name, members))).wait()
        self._subgroups.extend(found)
        return found[0] if found else None

    def _make_subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int]
    ) -> list[ShmGroup]:
        """Zero or one group. The first member makes the segment; all take part in the rounds."""
        area = self._area
        self._collectives.barrier(call)
        nbytes = Area.nbytes(len(members)) if self.rank == members[0] else 0
        segments = share_segments(
            area, call, nbytes, what=f"group {name!r}", timeout=self.timeout, reserve=False
        )
        if self.rank not in members:
            return []
        ranks = [self.ranks[member] for member in members]
        shared = segments[members[0]]
        own = Area(shared, area.board, members.index(self.rank), ranks, name)
        return [ShmGroup(own, self.timeout)]

    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        made: list[Window] = []
        self._run(call, lambda: made.append(self._make_window(call, numel, dtype))).wait()
        return made[0]

    def _make_window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        self._collectives.barrier(call)
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
        made: list[Tensor] = []
        self._run(call, lambda: made.append(self._make_shared(call, numel, dtype))).wait()
        return made[0]

    def _make_shared(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Tensor:
        """Rank 0 makes the segment; all take part in the rounds."""
        self._collectives.barrier(call)
        nbytes = numel * dtype.itemsize
        what = f"memory of {numel} elements that {self.size} ranks share"
        own = max(1, nbytes) if self.rank == 0 else 0
        segments = share_segments(self._area, call, own, what=what, timeout=self.timeout)
        with torch.inference_mode(False):  # it outlives the caller's mode
            return segments[0].tensor(0, nbytes).view(dtype)
