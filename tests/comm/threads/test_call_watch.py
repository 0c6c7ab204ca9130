"""A watch sees each call of all its ranks at once, and may hold them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.comm.threads.call_watch import CallWatch
from echelon.comm.threads.group import ThreadGroup
from echelon.diagnosis.collective_call import CollectiveCall


class Notes(CallWatch):
    """Notes which ranks call what, and the sum of their values before and after."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], str, str]] = []
        self.sums: list[float] = []

    @contextmanager
    def around(
        self, ranks: Sequence[int], calls: Sequence[CollectiveCall], operations: Sequence[Any]
    ) -> Iterator[None]:
        """See ``CallWatch``."""
        assert len(ranks) == len(calls) == len(operations)
        self._note(operations)
        yield
        self._note(operations)
        self.calls.append((list(ranks), calls[0].signature.op, calls[-1].signature.op))

    def _note(self, operations: Sequence[Any]) -> None:
        tensors = [op.tensor for op in operations if hasattr(op, "tensor")]
        self.sums.append(sum(tensor.sum().item() for tensor in tensors))


def watched(group: ec.Group, notes: Notes) -> None:
    """Let all ranks have one watch."""
    assert isinstance(group, ThreadGroup)
    group.thread_world.watch = notes


def test_a_watch_sees_collectives_and_messages_before_and_after_values_move() -> None:
    notes = Notes()

    def main(world: ec.World) -> None:
        watched(world.group, notes)
        world.group.all_reduce(torch.ones(2))
        if world.rank == 2:
            world.group.send(torch.ones(1), 0)
        if world.rank == 0:
            world.group.recv(torch.zeros(1), 2)

    ec.run(main, 3)
    assert notes.calls == [([0, 1, 2], "all_reduce", "all_reduce"), ([2, 0], "send", "recv")]
    assert notes.sums == [6, 18, 1, 2]


def test_a_call_in_which_ranks_disagree_is_not_watched() -> None:
    notes = Notes()

    def main(world: ec.World) -> None:
        watched(world.group, notes)
        world.group.all_reduce(torch.ones(1 + world.rank))

    with pytest.raises(ec.CollectiveMismatch):
        ec.run(main, 2)
    assert notes.calls == []


def test_by_default_nobody_watches() -> None:
    with CallWatch().around([0], [], []):
        pass

    def main(world: ec.World) -> bool:
        group = world.group
        return isinstance(group, ThreadGroup) and type(group.thread_world.watch) is CallWatch

    assert ec.run(main, 1) == [True]


class Slow(CallWatch):
    """Looks for longer than a rank waits for others."""

    @contextmanager
    def around(
        self, ranks: Sequence[int], calls: Sequence[CollectiveCall], operations: Sequence[Any]
    ) -> Iterator[None]:
        """See ``CallWatch``."""
        time.sleep(0.8)
        yield


@pytest.mark.slow
def test_nobody_is_late_where_all_ranks_have_joined() -> None:
    def main(world: ec.World) -> list[float]:
        group, values = world.group, torch.ones(2)
        group.barrier()
        assert isinstance(group, ThreadGroup)
        group.thread_world.watch = Slow()
        group.all_reduce(values)
        return values.tolist()

    assert ec.run(main, 2, timeout=0.5) == [[2, 2], [2, 2]]
