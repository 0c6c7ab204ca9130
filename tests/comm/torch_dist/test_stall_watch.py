"""Calls that a device does not finish end by name, on every rank: no call waits on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from echelon.comm.torch_dist.engines import NativeEngine
from echelon.comm.torch_dist.group import GroupSpec
from echelon.comm.torch_dist.job import Job
from echelon.comm.torch_dist.native import NativeGroup
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.errors import CollectiveMismatch, CommError, CommTimeout, RankFailed
from echelon.process import time_limits

SIZE = 3


class Queues:
    """What the devices of all ranks have been given; a call is done when all have given it."""

    def __init__(self) -> None:
        self.given: list[list[str]] = [[] for _ in range(SIZE)]
        self.goes_on = True


class QueuedWork:
    """A work whose ``wait`` returns at once, like that of NCCL."""

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self.is_completed = is_done

    def wait(self, timeout: object = None) -> bool:
        return True


class QueuedEngine:
    """The engine of one rank."""

    def __init__(self, queues: Queues, rank: int) -> None:
        self.queues, self.rank, self.aborted = queues, rank, False

    def give(self, op: str) -> QueuedWork:
        given = self.queues.given
        given[self.rank].append(op)
        number = len(given[self.rank])

        def is_done() -> bool:
            return self.queues.goes_on and all(len(of_rank) >= number for of_rank in given)

        return QueuedWork(is_done)

    def allreduce(self, tensors: object, options: object) -> QueuedWork:
        return self.give("allreduce")

    def broadcast(self, tensors: object, options: object) -> QueuedWork:
        return self.give("broadcast")

    def send(self, tensors: object, dst: int, tag: int) -> QueuedWork:
        return QueuedWork(lambda: False)

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "LOOK_FOR_STALLS_S", 0.05)
    monkeypatch.setattr(time_limits, "CLOSE_FAILED_WORLD_S", 0.2)


def outcomes(
    script: Callable[[NativeGroup], object], *, goes_on: bool = True, timeout: float = 0.5
) -> list[Any]:
    """What each rank's script ends with."""
    store, queues = c10d.HashStore(), Queues()
    queues.goes_on = goes_on

    def run(rank: int) -> Any:
        job = Job(store, RankMonitor.alone(rank), SIZE if rank == 0 else 0)
        engine = QueuedEngine(queues, rank)
        untyped: Any = engine
        native = NativeEngine(untyped, lambda failed: None, abort=engine.abort, queues=True)
        ranks = tuple(range(SIZE))
        none: Any = None
        spec = GroupSpec(job, "world", ranks, torch.device("cpu"), timeout, none)
        group = NativeGroup(spec, native)
        outcome: Any = None
        try:
            outcome = script(group)
        except (CommError, ValueError) as error:
            outcome = error
        finally:
            job.close(outcome if isinstance(outcome, BaseException) else None)
        return outcome

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


def go_on(group: NativeGroup) -> object:
    """Issue collectives until one raises."""
    while True:
        group.all_reduce(torch.ones(1), label="a later step")
        time.sleep(0.02)


def wait_for_the_end(group: NativeGroup) -> object:
    """As a script that waits for its device, which only an abort ends, and then goes on."""
    engine: Any = group._engine
    while not engine.aborted:
        time.sleep(0.01)
    return group.all_reduce(torch.ones(1))


def test_a_rank_that_does_not_come_is_named_with_the_call() -> None:
    def script(group: NativeGroup) -> object:
        group.all_reduce(torch.ones(2), label="first")
        if group.rank == 2:
            time.sleep(1.5)
        else:
            group.all_reduce(torch.ones(2), label="second")
        return wait_for_the_end(group) if group.rank < 2 else go_on(group)

    first, second, late = outcomes(script)
    for error in (first, second):
        assert isinstance(error, CommTimeout)
        assert error.missing == (2,)
        assert "'second' (#1 of group 'world') at " in error.doing
        assert "test_stall_watch.py" in error.doing
    assert isinstance(late, CommError)  # it hears of it


def test_ranks_that_issue_different_collectives_are_told_both() -> None:
    def script(group: NativeGroup) -> object:
        for label in ("one", "two") if group.rank else ("two", "one"):
            group.all_reduce(torch.ones(2), label=label)
        return wait_for_the_end(group)

    for error in outcomes(script, goes_on=False):
        assert isinstance(error, CollectiveMismatch)
        assert "of 'two'" in error.calls[0]
        assert "of 'one'" in error.calls[1]


def test_a_device_that_stands_still_is_told_from_a_rank_that_does_not_come() -> None:
    def script(group: NativeGroup) -> object:
        group.broadcast(torch.ones(2), 0)
        return wait_for_the_end(group)

    for error in outcomes(script, goes_on=False):
        assert isinstance(error, CommTimeout)
        assert "All ranks have issued all collectives" in str(error)


def test_the_peer_of_a_message_that_is_not_received_is_named() -> None:
    def script(group: NativeGroup) -> object:
        if group.rank == 0:
            group.isend(torch.ones(2), 1)
            return wait_for_the_end(group)
        return go_on(group)

    first = outcomes(script)[0]
    assert isinstance(first, CommTimeout)
    assert first.missing == (1,)
    assert "send" in first.doing


def test_a_rank_that_raises_is_named_long_before_the_timeout() -> None:
    def script(group: NativeGroup) -> object:
        group.all_reduce(torch.ones(2))
        if group.rank == 1:
            raise ValueError("the batch is empty")
        group.all_reduce(torch.ones(2))
        return wait_for_the_end(group)

    start_s = time.monotonic()
    first, raised, last = outcomes(script, timeout=60.0)
    assert time.monotonic() - start_s < 30.0
    assert isinstance(raised, ValueError)
    for error in (first, last):
        assert isinstance(error, RankFailed)
        assert error.failed_rank == 1
        assert "the batch is empty" in error.cause


def test_ranks_that_come_late_but_in_time_are_not_ended() -> None:
    def script(group: NativeGroup) -> str:
        for number in range(6):
            time.sleep(0.1 * (number % 3 == group.rank))
            group.all_reduce(torch.ones(2))
        return "done"

    assert outcomes(script, timeout=5.0) == ["done"] * SIZE
