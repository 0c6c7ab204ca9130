"""Stores in which ranks trust what they read, and how they wait for the keys of one another.

torch's TCP store does not authenticate anybody: every user of the host can read and write what
ranks tell each other in it. So the ranks of one host use a file store in memory of their user
(``create_memory_store``), and ranks of several hosts that share a secret seal each value
(``SealedStore``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

from torch._C import _distributed_c10d as c10d

from echelon.comm.secret import PROOF_NBYTES, Secret
from echelon.errors import AuthenticationError, WorldError
from echelon.process import time_limits
from echelon.process.background_threads import answer_of
from echelon.process.memory_files import open_memory

MEMORY_STORE_VARIABLE = "ECHELON_STORE"  # from ``echelon run``: the store's path and the job's id
_MEMORY_NAME = "echelon store"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.1


def await_keys(
    store: c10d.Store,
    keys: Sequence[str],
    deadline: float,
    *,
    check: Callable[[tuple[int, ...]], None],
    time_out: Callable[[tuple[int, ...]], Exception],
) -> None:
    """Return when the store has all keys.

    The store is polled, because its own wait would not notice a rank that has ended.

    Args:
        deadline: on the monotonic clock.
        check: is called about ten times a second with the positions of the missing keys; raises if
            they will never be written.
        time_out: makes the error of the deadline from the positions of the missing keys.
    """
    pause_s, everything = _FIRST_PAUSE_S, tuple(range(len(keys)))

    def are_there(wanted: Sequence[str]) -> bool:
        """Whether the store has these keys. Behind a cut link it never answers."""
        limit_s = max(time_limits.STORE_S, deadline - time.monotonic())
        if answers := answer_of(lambda: store.check(list(wanted)), limit_s):
            return answers[0]
        raise time_out(everything)

    while not are_there(keys):
        is_late = time.monotonic() > deadline
        if is_late or pause_s == _LONGEST_PAUSE_S:  # rarely, because this asks for each key
            missing = tuple(i for i, key in enumerate(keys) if not are_there([key]))
            if missing:
                check(missing)
                if is_late:
                    raise time_out(missing)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def create_memory_store() -> tuple[str, c10d.Store]:
    """A new store in a memfd, and the path by which processes of this user open it.

    The memfd listens nowhere and has no name, the kernel checks the user who opens it, and it ends
    with the last process that has it open. The path is valid while this process lives.
    """
    path, descriptor = create_store_memory()
    return path, _file_store(descriptor)


def create_store_memory() -> tuple[str, int]:
    """The same for other processes only: the path, and the descriptor to close in the end."""
    descriptor = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
    return f"/proc/{os.getpid()}/fd/{descriptor}", descriptor


def open_memory_store(path: str) -> c10d.Store:
    """The store that another process of this host has created.

    Raises:
        WorldError: it cannot be reached from here, or belongs to another user.
    """
    try:
        return _file_store(open_memory(path, _MEMORY_NAME))
    except OSError as error:
        raise WorldError(
            f"process {os.getpid()} cannot open the store of its job ({error}): the ranks of a "
            "host must be processes of one user in one container. Otherwise give all ranks one "
            "ECHELON_SECRET, and they meet over the network; if another user of this host has "
            "written that path, this is how it is refused"
        ) from error


def _file_store(descriptor: int) -> c10d.Store:
    # The descriptor stays open as long as the process: torch opens the path anew in each call and
    # once more when it destroys the store, and by then the number must not name another file.
    return c10d.FileStore(f"/proc/self/fd/{descriptor}", -1)


@final
class SealedStore(c10d.Store):
    """A store that others can write to, in which ranks accept only what ranks have written.

    Each value carries a proof of the secret over its scope and key, so a value that was written by
    somebody else, or under another key, is refused. Nothing prevents a stranger from deleting or
    overwriting a value: ranks then do not find one another, and say why.

    Whoever hands the store to C++ keeps the Python object alive, because C++ calls it.

    Args:
        scope: what the keys belong to; a value of another scope is refused.
    """

    def __init__(self, inner: c10d.Store, secret: Secret, scope: str) -> None:
        super().__init__()
        self.inner, self.secret, self._scope = inner, secret, scope.encode()

    def rekeyed(self, secret: Secret) -> SealedStore:
        """The same store with another secret."""
        return SealedStore(self.inner, secret, self._scope.decode())

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self.inner.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        """Read a value, after waiting until it is there.

        Raises:
            AuthenticationError: no rank of this job has written it.
        """
        return self._opened(key, self.inner.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several values."""
        return list(map(self._opened, keys, self.inner.multi_get(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value where there is no value yet; returns the value that is there afterwards."""
        assert not expected, "sealed values are never replaced by comparison"
        return self._opened(key, self.inner.compare_set(key, "", self._sealed(key, desired)))

    def check(self, keys: list[str]) -> bool:
        """Whether there are values, whoever has written them."""
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for values."""
        self.inner.wait(keys, *(() if timeout is None else (timeout,)))

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return self.inner.delete_key(key)

    def _words(self, key: str, value: bytes) -> tuple[bytes, ...]:
        return b"store", self._scope, key.encode(), value

    def _sealed(self, key: str, value: str | bytes) -> str:
        data = value.encode() if isinstance(value, str) else bytes(value)
        # As text in hex, because not every call of a store takes bytes.
        return self.secret.proof(*self._words(key, data)).hex() + data.hex()

    def _opened(self, key: str, sealed: bytes) -> bytes:
        try:
            data = bytes.fromhex(bytes(sealed).decode("ascii"))
        except ValueError:
            data = b""
        proof, value = data[:PROOF_NBYTES], data[PROOF_NBYTES:]
        if not self.secret.is_proof(proof, *self._words(key, value)):
            raise AuthenticationError.of_store(key)
        return value
