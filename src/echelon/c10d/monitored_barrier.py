"""A barrier that names the ranks which do not come, as gloo has it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import final

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.errors import CommError

_PASSED = "passed"


class MonitoredBarrierError(CommError, RuntimeError):
    """A rank did not pass a monitored barrier; c10d promises a ``RuntimeError``."""


@final
class MonitoredBarrier:
    """The monitored barriers of one process group, which ranks pass through its store.

    Rank 0 waits for every other rank, and then tells all of them whether they have passed.

    Args:
        store: of the process group.
        rank: in the group.
        size: of the group.
        clock: shows the seconds that count as time in which this rank has waited.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, clock: Callable[[], float]) -> None:
        self._store, self._rank, self._size, self._clock = store, rank, size, clock
        self._num_passed = 0

    def wait(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Return when all ranks have called it.

        Args:
            wait_all_ranks: name all ranks that do not come, not only the first.

        Raises:
            MonitoredBarrierError: some did not in time.
        """
        prefix = f"monitored barrier {self._num_passed}"
        self._num_passed += 1
        if self._rank == 0:
            self._lead(prefix, timeout.total_seconds(), wait_all_ranks)
        else:
            self._follow(prefix, timeout)

    def _lead(self, prefix: str, seconds: float, wait_all_ranks: bool) -> None:
        end = self._clock() + seconds
        missing: list[int] = []
        for rank in range(1, self._size):
            left = max(0.0, end - self._clock())
            if not self._has_come(f"{prefix}/{rank}", left):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if not missing:
            self._store.set(f"{prefix}/0", _PASSED)
            return
        names = ", ".join(map(str, missing))
        ranks = f"Rank {names}" if len(missing) == 1 else f"Ranks {names}"
        problem = f"{ranks} failed to pass monitoredBarrier in {seconds * 1e3:.0f} ms"
        self._store.set(f"{prefix}/0", problem)
        if seconds <= 0:
            problem = f"Rank 0 timed out in monitoredBarrier after 0 ms: {problem}"
        raise MonitoredBarrierError(problem)

    def _has_come(self, key: str, seconds: float) -> bool:
        if seconds <= 0 or self._store.check([key]):
            return self._store.check([key])
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    def _follow(self, prefix: str, timeout: timedelta) -> None:
        self._store.set(f"{prefix}/{self._rank}", "here")
        # Rank 0 may begin later than this rank, and then waits as long for others.
        if self._has_come(f"{prefix}/0", 2 * timeout.total_seconds()):
            problem = self._store.get(f"{prefix}/0").decode()
            if problem == _PASSED:
                return
        else:
            problem = f"nothing came from it in {2 * timeout.total_seconds() * 1e3:.0f} ms"
        raise MonitoredBarrierError(
            f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0: {problem}"
        )
