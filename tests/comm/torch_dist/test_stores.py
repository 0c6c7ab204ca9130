"""Ranks accept from a store only what ranks have written, and wait for its keys in limited time."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C import _distributed_c10d as c10d

from echelon.comm.secret import Secret
from echelon.comm.torch_dist.rendezvous import Rendezvous, meet
from echelon.comm.torch_dist.stores import (
    SealedStore,
    await_keys,
    create_memory_store,
    open_memory_store,
)
from echelon.errors import AuthenticationError, WorldError
from echelon.process.environment import JobEnvironment
from tests.children import environ

SECRET, OTHER = Secret(b"s" * 32), Secret(b"o" * 32)

# --- waiting for keys ----------------------------------------------------------------------------


class Missing(Exception):
    """Raised by a wait whose time is up, or whose check has failed."""


def await_two(store: c10d.Store, seconds: float, check: list[tuple[int, ...]]) -> None:
    deadline = time.monotonic() + seconds
    await_keys(store, ["a", "b"], deadline, check=check.append, time_out=Missing)


@pytest.mark.slow
def test_a_wait_ends_when_all_keys_are_there() -> None:
    store = c10d.HashStore()
    store.set("a", "")
    checks: list[tuple[int, ...]] = []
    timer = threading.Timer(0.5, store.set, ("b", ""))
    timer.start()
    await_two(store, 20.0, checks)
    timer.join()
    assert set(checks) == {(1,)}  # the position of the only key that was missing


def test_a_wait_names_the_missing_keys_at_its_deadline_after_a_last_check() -> None:
    checks: list[tuple[int, ...]] = []
    start_s = time.monotonic()
    with pytest.raises(Missing) as info:
        await_two(c10d.HashStore(), 0.05, checks)
    assert info.value.args == ((0, 1),)
    assert checks == [(0, 1)]
    assert time.monotonic() - start_s < 5


def test_a_check_ends_a_wait_long_before_its_deadline() -> None:
    def refuse(missing: tuple[int, ...]) -> None:
        raise KeyError(missing)

    start_s = time.monotonic()
    with pytest.raises(KeyError):
        await_keys(c10d.HashStore(), ["a"], start_s + 60, check=refuse, time_out=Missing)
    assert time.monotonic() - start_s < 5


# --- memory of one user --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_of_the_same_user_reads_and_writes_a_memory_store_by_its_path() -> None:
    path, store = create_memory_store()
    store.set("a", "1")
    script = (
        "from echelon.comm.torch_dist.stores import open_memory_store as o;"
        f"s = o({path!r}); s.set('b', s.get('a') + b'2')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environ())
    assert store.get("b") == b"12"


@pytest.mark.parametrize("path", ["/dev/null", "/proc/self/fd/99999", "/proc/self/exe"])
def test_a_path_that_is_no_memory_store_is_refused(path: str) -> None:
    with pytest.raises(WorldError, match="cannot open the store of its job"):
        open_memory_store(path)


# --- stores that others can write to -------------------------------------------------------------


def sealed(inner: c10d.Store, secret: Secret = SECRET, scope: str = "job") -> SealedStore:
    return SealedStore(inner, secret, scope)


def test_ranks_read_what_ranks_have_written() -> None:
    inner = c10d.HashStore()
    store = sealed(inner)
    store.set("a", "text")
    store.set("b", b"\0\xff")
    assert sealed(inner).multi_get(["a", "b"]) == [b"text", b"\0\xff"]
    assert store.compare_set("c", "", "mine") == b"mine"
    assert sealed(inner).compare_set("c", "", "yours") == b"mine"


@pytest.mark.parametrize("value", ["", "text", "00" * 40, "é", "zz" * 40])
def test_a_value_that_no_rank_has_written_is_refused_by_its_key(value: str) -> None:
    inner = c10d.HashStore()
    inner.set("segments", value)
    with pytest.raises(AuthenticationError, match="the value of 'segments' in the store was not"):
        sealed(inner).get("segments")


def test_a_value_of_a_rank_is_refused_under_another_key_scope_or_secret() -> None:
    inner = c10d.HashStore()
    sealed(inner).set("rank 0", "address")
    inner.set("rank 1", inner.get("rank 0").decode())
    for store, key in (
        (sealed(inner), "rank 1"),
        (sealed(inner, scope="another attempt"), "rank 0"),
        (sealed(inner, OTHER), "rank 0"),
    ):
        with pytest.raises(AuthenticationError):
            store.get(key)


def meeting(inner: c10d.Store) -> list[Rendezvous]:
    def join(rank: int) -> Rendezvous:
        env = JobEnvironment(launcher="slurm", rank=rank, size=2, local_rank=0, local_size=1)
        return meet(sealed(inner), env, "gloo", 10.0)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(join, range(2)))


def test_values_of_an_earlier_job_with_the_same_secret_are_refused() -> None:
    """A user may give each of his jobs one secret; what was recorded of one is worth nothing."""
    before, inner = c10d.HashStore(), c10d.HashStore()
    first, _ = meeting(before)
    first.store.set("group/world/0/0/1", "an address that a stranger has now")
    rank_0, rank_1 = meeting(inner)
    inner.set("group/world/0/0/1", before.get("group/world/0/0/1").decode())
    with pytest.raises(AuthenticationError):
        rank_0.store.get("group/world/0/0/1")
    rank_0.store.set("x", "y")
    assert rank_1.store.get("x") == b"y"


def test_an_engine_starts_over_a_sealed_store_and_refuses_an_address_of_a_stranger() -> None:
    inner = c10d.HashStore()
    stores = [sealed(inner), sealed(inner)]

    def start(rank: int) -> object:
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=10)
        return c10d.ProcessGroupGloo(c10d.PrefixStore("p", stores[rank]), rank, 2, options)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(start, range(2)))
    inner.set("p/0/1", "61" * 100)
    with pytest.raises(AuthenticationError, match="'p/0/1' in the store"):
        start(0)
