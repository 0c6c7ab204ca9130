"""Collectives of the simulated device are seen, ordered and asked for as those of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.tensor.debug import CommDebugMode

from echelon.errors import StateError
from echelon.testing.device import simulated_device
from echelon.testing.device.collectives import NAME, SimulatedGroup
from echelon.testing.device.simulated import install
from tests.device.compiler import needs_compiler
from tests.device.programs import OverAtOnce
from tests.rank_zero import fake_engine

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    install()
    dist.init_process_group(NAME, store=c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_dispatch_mode_sees_a_collective(one_rank: None) -> None:
    with simulated_device(), CommDebugMode() as seen:
        dist.broadcast(torch.ones(4, device="sim"), 0)
    assert seen.get_comm_counts() == {torch.ops.c10d.broadcast_: 1}


def races_of(*, is_asynchronous: bool, waits: bool) -> list[str]:
    options = dist.AllreduceOptions()
    options.asyncOp = is_asynchronous
    with simulated_device() as device:
        x = torch.ones(4, device="sim")
        group = dist.group.WORLD
        assert group is not None
        work = group.allreduce([x], options)
        if waits:
            work.wait()
        x.add_(1)
        return [finding.kind for finding in device.report().findings]


def test_only_an_asynchronous_collective_has_to_be_waited_for(one_rank: None) -> None:
    assert "write after write" in races_of(is_asynchronous=True, waits=False)
    assert races_of(is_asynchronous=True, waits=True) == []
    assert races_of(is_asynchronous=False, waits=False) == []


def test_work_tells_when_it_is_done_and_what_it_has_given(one_rank: None) -> None:
    with simulated_device():
        x = torch.ones(4, device="sim")
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        while not work.is_completed():
            pass
        assert work.get_future().wait()[0] is x
        assert work.result()[0].tolist() == [1.0] * 4


class NotesCalls(OverAtOnce):
    """An engine that notes the names of its calls."""

    def __init__(self) -> None:
        super().__init__(fake_engine(0, 2))
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.calls.append(name)
        return super().__getattr__(name)


def test_the_first_collective_of_a_group_meets_all_ranks_and_a_message_does_not() -> None:
    install()
    engine = NotesCalls()
    group = SimulatedGroup(engine, 0, 2)
    with simulated_device():
        x = torch.ones(4, device="sim")
        group.send([x], 1, 0)
        group.allreduce([x], dist.AllreduceOptions())
        group.broadcast([x], dist.BroadcastOptions())
    assert engine.calls == ["send", "barrier", "allreduce", "broadcast"]


class NobodyComes(NotesCalls):
    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "barrier":
            raise RuntimeError("Timed out")
        return super().__getattr__(name)


def test_ranks_that_do_not_come_to_the_first_collective_are_told_in_a_sentence() -> None:
    install()
    with simulated_device(), pytest.raises(StateError, match="two groups for the first time"):
        SimulatedGroup(NobodyComes(), 0, 2).allreduce(
            [torch.ones(4, device="sim")], dist.AllreduceOptions()
        )
