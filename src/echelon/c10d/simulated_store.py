"""Stores of ``torch.distributed`` for simulated ranks: one dictionary in memory, and no port.

A rank that waits for a key hands on its turn, so that another can set it. Ranks that wait for a key
which nobody can set any more are a deadlock, and are told so at once.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, ClassVar, final

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.c10d import simulated_rank
from echelon.comm.threads.group import ThreadGroup
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.diagnosis.collective_call import CallSignature
from echelon.errors import CommTimeout

_LOWEST_PORT, _NUM_PORTS = 29_500, 1_000
_LOOK_S = 0.01


@final
class StoreHub:
    """What the stores of one world of simulated ranks have in common.

    Attributes:
        by_address: the content of each store, by what its users name it with.
        names: how many groups have been named after each name of c10d.
        master_port: the number that ranks find in the variable MASTER_PORT.
    """

    def __init__(self) -> None:
        self.by_address: dict[object, Entries] = {}
        self.names: Counter[str] = Counter()
        self._stores: list[c10d.Store] = []
        self._ports = count()
        self.master_port = self.free_port()

    def entries(self, address: object) -> Entries:
        """The content of the store with an address, the same for all ranks."""
        return self.by_address.setdefault(address, Entries())

    def keep(self, store: c10d.Store) -> None:
        """Keep a store alive: C++ code may hold it alone, whose methods end with the object."""
        self._stores.append(store)

    def free_port(self) -> int:
        """A number that no other store of these ranks has; nothing listens there."""
        return _LOWEST_PORT + next(self._ports) % _NUM_PORTS

    def unused_name(self, name: str) -> str:
        """A name for a group that no other group of these ranks has."""
        self.names[name] += 1
        return name if self.names[name] == 1 else f"{name} ({self.names[name]})"


_hubs: weakref.WeakKeyDictionary[ThreadWorld, StoreHub] = weakref.WeakKeyDictionary()


def hub_of(group: ThreadGroup) -> StoreHub:
    """The stores of the ranks of a group."""
    return _hubs.setdefault(group.thread_world, StoreHub())


@final
class Entries:
    """The content of a store: values by keys, and queues by theirs."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}


class SimulatedStore(c10d.Store):
    """A store whose users are simulated ranks; the base of those with the names of torch's.

    Args:
        entries: its content, which it shares with other stores of the same address.
        timeout: how long a rank waits for a key by default; unset: as for a call of a group.

    Attributes:
        real: the store of torch that a class stands for.
    """

    real: ClassVar[Callable[..., c10d.Store] | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make torch's own where the caller is no simulated rank."""
        if cls.real is not None and simulated_rank.world_group() is None:
            return cls.real(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, entries: Entries, timeout: timedelta | None = None) -> None:
        super().__init__()
        self._entries = entries
        hub_of(simulated_rank.require_world_group()).keep(self)
        if timeout is not None:
            self.set_timeout(timeout)

    # What other languages' code calls through the names of C++ -----------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._entries.values[key] = _bytes(value)
        _wake()

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        self.wait([key])
        return self._entries.values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0; its new value."""
        total = int(self._entries.values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a value if it is the expected one, or if neither is there; the value afterwards."""
        values = self._entries.values
        expected = _bytes(expected_value)
        if key not in values and expected:
            return expected
        if values.get(key, b"") == expected:
            self.set(key, desired_value)
        return values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self._entries.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there.

        Raises:
            DistStoreError: they are not there in time.
            DeadlockError: no rank can set them any more.
        """
        if self.check(keys):
            return
        wait_for_keys(self, list(keys), None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._entries.values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._entries.values)

    deleteKey = delete_key
    getNumKeys = num_keys

    def append(self, key: str, value: str | bytes) -> None:
        """Put more bytes behind a value."""
        self.set(key, self._entries.values.get(key, b"") + _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, once all are there."""
        self.wait(keys)
        return [self._entries.values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether it can append, and get and set several values at once."""
        return True

    def list_keys(self) -> list[str]:
        """All keys."""
        return list(self._entries.values)

    def clone(self) -> SimulatedStore:
        """A store with the same content."""
        return SimulatedStore(self._entries, self.timeout)  # type: ignore[attr-defined]

    # Queues --------------------------------------------------------------------------------------

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self._entries.queues.setdefault(key, deque()).append(_bytes(value))
        _wake()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, once it has one."""
        queue = self._entries.queues.setdefault(key, deque())
        if not queue and not block:
            raise dist.QueueEmptyError(f"the queue {key!r} is empty")
        if not queue:
            _await(CallSignature("queue_pop", label=key), lambda: bool(queue), None)
        return queue.popleft()

    def queue_len(self, key: str) -> int:
        """How many values a queue has."""
        return len(self._entries.queues.get(key, ()))


class SimulatedTCPStore(SimulatedStore):
    """A ``TCPStore`` of simulated ranks: those with the same host and port share their keys."""

    real = c10d.TCPStore

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        *_: object,
        **__: object,
    ) -> None:
        group = simulated_rank.require_world_group()
        hub = hub_of(group)
        self.host, self.port = host_name, port or hub.free_port()
        super().__init__(hub.entries(("tcp", self.port)), timeout)

    @property
    def libuvBackend(self) -> bool:
        """Whether torch's own store would use libuv, as it does by default."""
        return True


class SimulatedFileStore(SimulatedStore):
    """A ``FileStore`` of simulated ranks, without a file."""

    real = c10d.FileStore

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        self.path = file_name
        hub = hub_of(simulated_rank.require_world_group())
        super().__init__(hub.entries(("file", os.path.abspath(file_name))))


class SimulatedHashStore(SimulatedStore):
    """A ``HashStore`` of simulated ranks, which those share that one has given it to."""

    real = c10d.HashStore

    def __init__(self) -> None:
        super().__init__(Entries())


def wait_for_members(
    store: c10d.Store,
    keys: list[str],
    signature: CallSignature,
    limit_s: float,
    missing: Callable[[], set[int]] | None = None,
) -> None:
    """Return when a store has keys that members of a group set.

    Args:
        limit_s: the timeout of the group.
        missing: the ranks that have not come, as far as that is known.
    """
    lowest = store
    while isinstance(lowest, c10d.PrefixStore):
        lowest = lowest.underlying_store
    if isinstance(lowest, SimulatedStore):
        _await(signature, lambda: store.check(keys), None, missing, limit_s)
        return
    while not store.check(keys):  # torch's own store, which does not say when it gets a key
        with suppress(CommTimeout):
            _await(signature, lambda: store.check(keys), _LOOK_S, missing, limit_s)


def wait_for_keys(store: c10d.Store, keys: list[str], seconds: float | None = None) -> None:
    """Return when a store has all keys; the rank hands on its turn meanwhile."""
    missing = [key for key in keys if not store.check([key])]
    short = ", ".join(repr(key.rpartition("/")[2]) for key in missing)
    label = short if len(short) < 200 else f"{len(missing)} keys"
    try:
        _await(CallSignature("store.wait", label=label), lambda: store.check(keys), seconds)
    except CommTimeout as error:
        missing = [key for key in keys if not store.check([key])]
        raise dist.DistStoreError(
            f"wait timeout after {error.seconds * 1e3:.0f}ms, keys: {', '.join(missing)}"
        ) from error


def _await(
    signature: CallSignature,
    ready: Callable[[], bool],
    seconds: float | None,
    missing: Callable[[], set[int]] | None = None,
    limit_s: float | None = None,
) -> None:
    simulated_rank.require_world_group().wait_until(signature, ready, seconds, missing, limit_s)


def _wake() -> None:
    group = simulated_rank.world_group()
    if group is not None:
        group.thread_world.wake_conditions()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
