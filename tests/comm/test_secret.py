"""A secret proves words without being shown."""

import pytest

from echelon.comm.secret import Secret
from echelon.errors import WorldError


def test_a_proof_holds_for_the_same_secret_and_words_only() -> None:
    secret, other = Secret(b"s" * 32), Secret(b"o" * 32)
    proof = secret.proof(b"ab", b"c")
    assert Secret.from_hex(secret.to_hex()).is_proof(proof, b"ab", b"c")
    assert not secret.is_proof(proof, b"a", b"bc")  # no two lists of words read alike
    assert not other.is_proof(proof, b"ab", b"c")
    assert not secret.derived(b"ab").is_proof(proof, b"ab", b"c")


@pytest.mark.parametrize("text", ["short", "g" * 64, "0" * 63])
def test_a_malformed_secret_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(WorldError, match=r"ECHELON_SECRET has \d+ characters and must") as info:
        Secret.of({"ECHELON_SECRET": text})
    assert text not in str(info.value)
    assert Secret.of({}) is None
    assert "5c" not in repr(Secret.of({"ECHELON_SECRET": "5c" * 32}))
