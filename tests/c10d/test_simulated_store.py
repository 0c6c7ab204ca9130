"""Stores of torch.distributed for simulated ranks."""

import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import echelon as ec
from echelon.c10d.simulated_store import SimulatedStore


def uses_a_store(world: ec.World, kind: str, address: str) -> object:
    store = dist.TCPStore(address, 29_400) if kind == "tcp" else dist.FileStore(address, world.size)
    assert isinstance(store, SimulatedStore)
    prefixed = dist.PrefixStore("of the test", dist.PrefixStore("nested", store))
    del store  # C++ code has it alone
    if world.rank == 0:
        prefixed.wait(["late"])  # hands on the turn
    else:
        prefixed.set("late", "here")
    assert prefixed.get("late") == b"here"
    world.group.barrier()
    prefixed.add("count", world.rank)
    world.group.barrier()
    assert prefixed.add("count", 0) == sum(range(world.size))
    winner = prefixed.compare_set("first", "", f"rank {world.rank}")
    assert prefixed.check(["late", "count"])
    assert not prefixed.check(["nowhere"])
    assert prefixed.multi_get(["late", "first"]) == [b"here", winner]
    world.group.barrier()
    return prefixed.num_keys()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_that_name_the_same_store_share_its_keys(kind: str, tmp_path: Path) -> None:
    assert ec.run(uses_a_store, 3, args=(kind, str(tmp_path / "store"))) == [3, 3, 3]
    assert list(tmp_path.iterdir()) == []


def opens_a_port(world: ec.World) -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", store.port))  # nobody else has it
    return int(store.port)


def test_no_port_is_opened() -> None:
    assert len(set(ec.run(opens_a_port, 2))) == 2


def waits_for_nobody(world: ec.World) -> None:
    if world.rank == 0:
        dist.TCPStore("host", 1).get("never")
    world.group.barrier()


def test_a_key_that_nobody_can_set_any_more_is_a_deadlock_with_both_lines() -> None:
    start_s = time.monotonic()
    with pytest.raises(ec.DeadlockError) as caught:
        ec.run(waits_for_nobody, 2)
    assert time.monotonic() - start_s < 30.0  # its timeout is 300 s
    assert "rank 0 waits in store.wait of \"'never'\"" in str(caught.value)
    assert "in waits_for_nobody" in str(caught.value)
    assert "rank 1 waits in barrier" in str(caught.value)


def waits_a_moment(world: ec.World) -> str:
    store = dist.HashStore()
    with pytest.raises(
        dist.DistStoreError, match=r"wait timeout after 50ms, keys: /?never"
    ) as caught:
        store.wait(["never"], timedelta(milliseconds=50))
    return type(caught.value).__name__


def test_a_wait_with_a_timeout_of_its_own_ends_as_torchs_does() -> None:
    assert ec.run(waits_a_moment, 2) == ["DistStoreError"] * 2


def uses_queues(world: ec.World) -> list[bytes]:
    store = dist.TCPStore("host", 2)
    if world.rank == 0:
        return [store.queue_pop("jobs"), store.queue_pop("jobs")]
    store.queue_push("jobs", "first")
    store.queue_push("jobs", "second")
    return []


def test_a_queue_gives_its_values_in_order() -> None:
    assert ec.run(uses_queues, 2) == [[b"first", b"second"], []]


def keeps_the_class(world: ec.World) -> type:
    return dist.TCPStore


def test_the_class_makes_torchs_own_store_outside_of_ranks() -> None:
    (simulated,) = ec.run(keeps_the_class, 1)
    assert dist.TCPStore is not simulated
    assert type(simulated("127.0.0.1", 0, is_master=True)) is dist.TCPStore
