"""Engines of torch: this build has gloo, which listens on the loopback interface where asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.comm.torch_dist.engines import (
    available_backends,
    backend_of_device_kind,
    cpu_engine,
    start_gloo,
    start_native,
)
from echelon.errors import WorldError

LIMIT = timedelta(seconds=20)


def test_the_backends_are_those_of_this_build_of_torch() -> None:
    backends = available_backends()
    assert "gloo" in backends
    assert ("nccl" in backends) == dist.is_nccl_available()


def test_engines_on_the_loopback_interface_carry_tagged_messages() -> None:
    store = c10d.HashStore()

    def run(rank: int) -> float:
        engine = start_gloo(store, rank, 2, LIMIT, loopback=True)
        received = torch.empty(1)
        works = [
            engine.send([torch.tensor([rank + 1.0])], 1 - rank, 7),
            engine.recv([received], 1 - rank, 7),
        ]
        for work in works:
            work.wait(LIMIT)
        return received.item()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [2.0, 1.0]


def test_the_first_engine_of_another_backend_is_the_default_group_and_ends_it() -> None:
    native = start_native("gloo", c10d.HashStore(), "world", [0], 0, LIMIT)
    assert native.engine is dist.group.WORLD
    assert backend_of_device_kind(dist.group.WORLD)["cpu"] == "gloo"
    tensor = torch.tensor([3.0])
    cpu_engine(dist.group.WORLD).allreduce([tensor], c10d.AllreduceOptions()).wait()
    assert tensor.item() == 3.0
    native.shut_down(False)
    assert not dist.is_initialized()


@pytest.mark.skipif(dist.is_nccl_available(), reason="this build of torch has NCCL")
def test_a_build_without_nccl_is_named() -> None:
    with pytest.raises(WorldError, match="has no NCCL: use backend 'gloo'"):
        start_native("nccl", c10d.HashStore(), "world", [0], 0, LIMIT)


class NCCL:
    """Stands for ``ProcessGroupNCCL``, which builds for the CPU do not have."""

    class Options:
        pass

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        self.options = vars(options)
        self.ends: list[str] = []

    def abort(self) -> None:
        self.ends.append("abort")

    def shutdown(self) -> None:
        self.ends.append("shutdown")


def test_nccl_is_named_in_its_reports_and_its_watchdog_comes_after_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", NCCL, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    native = start_native("nccl", c10d.HashStore(), "world.1", [3, 5], 1, LIMIT)
    engine: Any = native.engine
    assert native.queues
    assert engine.options["_timeout"] > LIMIT
    assert engine.options["group_name"] == "world.1"
    assert engine.options["global_ranks_in_group"] == [3, 5]
    assert engine.options["is_high_priority_stream"]
    native.shut_down(False)
    native.abort()
    native.shut_down(True)
    assert engine.ends == ["shutdown", "abort", "abort"]
