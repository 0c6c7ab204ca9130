"""The secret of a job, by which its ranks authenticate each other.

A secret is never sent. Those who know it can make a message authentication code (HMAC) of any
words, and verify the codes of others.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Self, final

from echelon.errors import WorldError

VARIABLE = "ECHELON_SECRET"  # set by users for all ranks of a job on several hosts
NONCE_NBYTES = PROOF_NBYTES = 32
_KEY_NBYTES = 32
_HEX = re.compile(r"[0-9a-fA-F]{64}")


def nonce() -> bytes:
    """New random bytes, so that nobody can replay a proof that contains them."""
    return secrets.token_bytes(NONCE_NBYTES)


@final
class Secret:
    """256 bits that the ranks of one job share."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == _KEY_NBYTES, "a secret has 256 bits"
        self._key = key

    def __repr__(self) -> str:
        return "Secret(...)"  # the key must not appear in a traceback or a log

    @classmethod
    def create(cls) -> Self:
        """A new random secret."""
        return cls(secrets.token_bytes(_KEY_NBYTES))

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """The secret in ``ECHELON_SECRET``; None if it is not set. Errors do not show its value."""
        text = environ.get(VARIABLE, "")
        if not text:
            return None
        if _HEX.fullmatch(text) is None:
            raise WorldError(
                f"{VARIABLE} has {len(text)} characters and must have 64 hexadecimal digits (256 "
                "bits), the same ones for all ranks: export it as "
                f'{VARIABLE}="$(openssl rand -hex 32)", or unset it'
            )
        return cls(bytes.fromhex(text))

    @classmethod
    def from_hex(cls, text: str) -> Self:
        """The secret that ``to_hex`` wrote."""
        return cls(bytes.fromhex(text))

    def to_hex(self) -> str:
        """The secret as text, for memory that only this user can read."""
        return self._key.hex()

    def proof(self, *words: bytes) -> bytes:
        """The authentication code of these words. 32 bytes."""
        code = hmac.new(self._key, digestmod=hashlib.sha256)
        for word in words:
            code.update(
                len(word).to_bytes(8, "little") + word
            )  # so that no two lists have the same bytes
        return code.digest()

    def is_proof(self, proof: bytes, *words: bytes) -> bool:
        """Whether ``proof`` is the authentication code of these words."""
        return hmac.compare_digest(proof, self.proof(*words))

    def derived(self, *words: bytes) -> Secret:
        """A secret that only those who know this one and the words can derive."""
        return Secret(self.proof(b"derived", *words))
