"""The secret of a job: what its ranks know and nobody else, and how they prove that they know it.

A secret is never sent. Who knows it can make, of any words, the code that goes with them (HMAC),
and check whether somebody else has.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Self, final

from echelon.errors import WorldError

VARIABLE = "ECHELON_SECRET"  # in which the user gives one to all ranks of a job on several hosts
NONCE_NBYTES = PROOF_NBYTES = 32
_KEY_NBYTES = 32
_HEX = re.compile(r"[0-9a-fA-F]{64}")


def nonce() -> bytes:
    """Bytes that were never used before, so that no proof about them can have been recorded."""
    return secrets.token_bytes(NONCE_NBYTES)


@final
class Secret:
    """256 bits that the ranks of one job share.

    Args:
        key: of 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        assert len(key) == _KEY_NBYTES, "a secret has 256 bits"
        self._key = key

    def __repr__(self) -> str:
        return "Secret(...)"  # it must not come into a traceback or a log

    @classmethod
    def create(cls) -> Self:
        """A new one."""
        return cls(secrets.token_bytes(_KEY_NBYTES))

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """The one that the user has given in ``ECHELON_SECRET``; None where there is none.

        Raises:
            WorldError: it is no number of 256 bits in hex; does not show it.
        """
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
        """The one that ``to_hex`` gave."""
        return cls(bytes.fromhex(text))

    def to_hex(self) -> str:
        """As text, for memory that only this user can read."""
        return self._key.hex()

    def proof(self, *words: bytes) -> bytes:
        """What only those who know the secret can make of these words. 32 bytes."""
        code = hmac.new(self._key, digestmod=hashlib.sha256)
        for word in words:
            code.update(len(word).to_bytes(8, "little") + word)  # so no two lists read alike
        return code.digest()

    def is_proof(self, proof: bytes, *words: bytes) -> bool:
        """Whether somebody who knows the secret has made ``proof`` of these words."""
        return hmac.compare_digest(proof, self.proof(*words))

    def derived(self, *words: bytes) -> Secret:
        """The secret of those who know this one and have heard the same words."""
        return Secret(self.proof(b"derived", *words))
