"""A store that others can write to, in which ranks trust only what ranks have written.

Each value carries a proof of the secret over its key: what was written by somebody else, or under
another key, is refused. What cannot be prevented is that somebody deletes or overwrites a value:
ranks then do not find one another, and say why.
"""

from __future__ import annotations

from datetime import timedelta
from typing import final

from torch._C import _distributed_c10d as c10d

from echelon.comm.secret import PROOF_NBYTES, Secret
from echelon.errors import AuthenticationError


@final
class SealedStore(c10d.Store):
    """``inner`` with a proof for each value.

    Whoever hands it to C++ keeps it alive: that calls the Python object.

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
        """Read a value; waits until it is there.

        Raises:
            AuthenticationError: no rank of this job has written it.
        """
        return self._opened(key, self.inner.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several values."""
        return list(map(self._opened, keys, self.inner.multi_get(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value where there is none; the value that is there now."""
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

    def _opened(self, key: str, found: bytes) -> bytes:
        try:
            data = bytes.fromhex(bytes(found).decode("ascii"))
        except ValueError:
            data = b""
        proof, value = data[:PROOF_NBYTES], data[PROOF_NBYTES:]
        if not self.secret.is_proof(proof, *self._words(key, value)):
            raise AuthenticationError.of_store(key)
        return value
