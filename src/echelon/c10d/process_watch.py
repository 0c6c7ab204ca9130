"""What a process tells others of itself as a rank of ``torch.distributed``, and what it sees.

A program that calls ``init_process_group`` leaves the same records as one that calls
``echelon.init``: its last call and step in the flight recorder, and why it failed in a file and in
the tables of its groups. So the ranks that wait for it, and its launcher, can name it.

A rank that works on alone after the others have ended is not ended, because torch allows it.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from torch._C import _distributed_c10d as c10d

from echelon.comm.torch_dist.stores import await_keys
from echelon.diagnosis.collective_call import CallSignature, CollectiveCall, caller
from echelon.diagnosis.exit_guard import guard_script
from echelon.diagnosis.rank_monitor import RankMonitor, StepCounter, counter
from echelon.errors import CommTimeout, RankFailed, WorldError
from echelon.process.environment import JobEnvironment, environment
from echelon.process.forks import ForkMark, mark

if TYPE_CHECKING:
    from echelon.comm.shm import ShmGroup


@final
class ProcessWatch:
    """The record of this process as a rank, and its view of the other ranks.

    Args:
        monitor: of this rank.
        hooked: whether whoever has started the rank tells of its failure.
    """

    def __init__(self, monitor: RankMonitor, *, hooked: bool) -> None:
        self.monitor = monitor
        self._hooked = hooked
        self._groups: weakref.WeakSet[ShmGroup] = weakref.WeakSet()
        self._num_calls = 0
        self.mark: ForkMark = mark()

    @classmethod
    def of_environment(cls, rank: int, size: int) -> ProcessWatch:
        """That of a rank which a launcher has started, or alone where none of this size has."""
        job = _job()
        if job is None or (job.rank, job.size) != (rank, size):
            return cls(RankMonitor.alone(rank), hooked=True)
        return cls(RankMonitor.of_job(job, os.environ), hooked=False)

    def start(self) -> None:
        """Have the launcher and the others told of an exception that ends this process."""
        if self._hooked:
            return
        self._hooked = True
        steps = counter()  # of the world, if the rank is in one
        if steps is None:
            steps = StepCounter(self.monitor.record_step, self.monitor.step_rows)
            steps.count()
        program_steps = steps  # a world that the script makes later counts in its own
        guard_script(
            self.monitor.rank,
            lambda: f"at step {(counter() or program_steps).number}",
            fail=self.close,
            leave=self.leave,
        )

    def share(self, store: c10d.Store) -> None:
        """Move to one flight recorder for all ranks of this host, if no launcher has made one."""
        job = _job()
        if job is not None and job.one_host and job.rank == self.monitor.rank:
            self.monitor.share(job, store)

    def add(self, group: ShmGroup) -> None:
        """Take care of a group of this rank."""
        self._groups.add(group)

    def close(self, error: BaseException) -> None:
        """Tell the other ranks in all groups that this one fails."""
        for group in list(self._groups):
            group.close(error)

    def leave(self) -> None:
        """Tell the other ranks that the script of this one has ended."""
        if self.mark is mark():
            for group in list(self._groups):
                group.leave()

    # Meeting in a store ----------------------------------------------------------------------

    def call(self, signature: CallSignature) -> CollectiveCall:
        """Record what this rank calls, outside of its groups."""
        rank = self.monitor.rank
        call = CollectiveCall(signature, caller(), self._num_calls, "torch", rank, True)
        self._num_calls += 1
        self.monitor.record_call(call)
        return call

    def await_keys(
        self,
        store: c10d.Store,
        key: str,
        keys: dict[int, str],
        call: CollectiveCall,
        seconds: float,
    ) -> None:
        """Return when the store has ``key``, which is there once it has the keys of all ranks.

        Args:
            keys: what each rank (in the job) writes.

        Raises:
            CommTimeout: a rank does not come in time.
            RankFailed: a rank has ended.
        """
        monitor = self.monitor

        def missing() -> list[int]:
            return [rank for rank, each in keys.items() if not store.check([each])]

        def look(_: Sequence[int]) -> None:
            late = missing()
            monitor.check(str(call))
            monitor.wait_for(late[0] if late else None)
            for rank in late:
                status = monitor.status(rank)
                if status is not None and status.ended and not store.check([keys[rank]]):
                    died = f"died {status.where}: it was killed, crashed or called os._exit"
                    raise RankFailed(rank, died, str(call))

        def time_out(_: Sequence[int]) -> Exception:
            monitor.give_up(late := missing())
            return monitor.explained(CommTimeout(str(call), late, seconds))

        deadline = time.monotonic() + seconds
        try:
            await_keys(store, [key], deadline, check=look, time_out=time_out)
        finally:
            monitor.wait_for(None)


def _job() -> JobEnvironment | None:
    """The job that a launcher has described; torch needs less than all of its variables."""
    try:
        return environment(os.environ)
    except WorldError:
        return None


_watch: ProcessWatch | None = None


def process_watch(rank: int, size: int) -> ProcessWatch:
    """The watch of this process, which begins with its default group."""
    global _watch
    if _watch is None or _watch.mark is not mark():  # of the rank that has forked this process
        _watch = ProcessWatch.of_environment(rank, size)
    return _watch


def use_monitor(monitor: RankMonitor) -> None:
    """Let this process, which has a monitor as a rank already, use that one."""
    global _watch
    _watch = ProcessWatch(monitor, hooked=True)


def close_groups(error: BaseException) -> None:
    """Tell the other ranks in all groups of ``torch.distributed`` that this one fails."""
    if _watch is not None and _watch.mark is mark():
        _watch.close(error)


def leave_groups() -> None:
    """Tell the other ranks that the function of this one has returned."""
    if _watch is not None:
        _watch.leave()


def begin(rank: int, size: int) -> ProcessWatch:
    """The watch of this process, from the call of ``init_process_group`` on."""
    watch = process_watch(rank, size)
    watch.monitor.enter_torch()
    watch.start()
    return watch
