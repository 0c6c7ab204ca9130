"""A barrier that names the ranks which do not come, as gloo has it."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import final

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.c10d.connection import Connection
from echelon.diagnosis.collective_call import CallSignature
from echelon.errors import CommError, CommTimeout, RankFailed

_PASSED, _CALL = "passed", CallSignature("monitored_barrier")


class MonitoredBarrierError(CommError, RuntimeError):
    """A rank did not pass a monitored barrier; c10d promises a ``RuntimeError``."""


@final
class MonitoredBarrier:
    """The monitored barriers of one process group, which ranks pass through its store.

    Rank 0 waits for every other rank, and then tells all of them whether they have passed.

    Args:
        store: of the process group.
        connection: of the ranks of the group.
    """

    def __init__(self, store: c10d.Store, connection: Connection) -> None:
        self._store, self._connection, self._group = store, connection, connection.group
        self._num_passed = 0

    def wait(self, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        """Return when all ranks have called it.

        Args:
            timeout: within it, a rank that has ended is one that may still come; None: that of the
                group, whose ranks say of one another that they have ended.
            wait_all_ranks: name all ranks that do not come, not only the first.

        Raises:
            MonitoredBarrierError: some did not in time, or have ended.
            DeadlockError: simulated ranks wait for one that has ended, or for one another.
        """
        prefix = f"monitored barrier {self._num_passed}"
        self._num_passed += 1
        if self._group.rank == 0:
            self._lead(prefix, timeout, wait_all_ranks)
        else:
            self._follow(prefix, timeout)

    def _lead(self, prefix: str, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        seconds = self._seconds(timeout)
        end = self._connection.clock() + seconds
        missing: dict[int, str] = {}
        for rank in range(1, self._group.size):
            left = max(0.0, end - self._connection.clock())
            why = self._why_missing(f"{prefix}/{rank}", rank, left, timeout)
            if why is not None:
                missing[rank] = why
                if not wait_all_ranks:
                    break
        if not missing:
            self._set(f"{prefix}/0", _PASSED)
            return
        names = ", ".join(map(str, missing))
        ranks = f"Rank {names}" if len(missing) == 1 else f"Ranks {names}"
        problem = f"{ranks} failed to pass monitoredBarrier{next(iter(missing.values()))}"
        self._set(f"{prefix}/0", problem)
        if seconds <= 0:
            problem = f"Rank 0 timed out in monitoredBarrier after 0 ms: {problem}"
        raise MonitoredBarrierError(problem)

    def _seconds(self, timeout: timedelta | None) -> float:
        return self._group.timeout if timeout is None else timeout.total_seconds()

    def _set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._connection.wake()

    def _why_missing(
        self, key: str, rank: int, seconds: float, timeout: timedelta | None
    ) -> str | None:
        """Wait for a key of a rank; why it does not come, as the end of a sentence."""
        if self._store.check([key]):
            return None
        if timeout is None:
            try:
                self._connection.await_key(self._store, key, rank, _CALL, seconds)
            except (CommTimeout, RankFailed) as error:
                return f": {error}"
            return None
        with suppress(dist.DistStoreError):
            if seconds > 0:
                self._store.wait([key], timedelta(seconds=seconds))
                return None
        return f" in {timeout.total_seconds() * 1e3:.0f} ms"

    def _follow(self, prefix: str, timeout: timedelta | None) -> None:
        self._set(f"{prefix}/{self._group.rank}", "here")
        # Rank 0 may begin later than this rank, and then waits as long for others.
        twice = None if timeout is None else 2 * timeout
        why = self._why_missing(f"{prefix}/0", 0, 2 * self._seconds(timeout), twice)
        problem = f"nothing came from it{why}"
        if why is None:
            problem = self._store.get(f"{prefix}/0").decode()
            if problem == _PASSED:
                return
        raise MonitoredBarrierError(
            f"Rank {self._group.rank} successfully reached monitoredBarrier, but received errors "
            f"while waiting for send/recv from rank 0: {problem}"
        )
