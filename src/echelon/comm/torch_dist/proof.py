"""Proofs by which ranks authenticate each other over each new connection, before any other message.

A gloo connection belongs to whoever connects first and sends a small number. So over each new
connection both ends prove that they know the secret of the job, without sending it::

    rank a                                              rank b
    nonce of a for b          ───────────────────>
                              <───────────────────      nonce of b for a
    proof(group, a, b, nonce of b, nonce of a) ──>
                              <──  proof(group, b, a, nonce of a, nonce of b)

A proof covers one direction, one group and two numbers that were never used before, so a proof
that was recorded, or sent back to its sender, is worth nothing. What a rank sends afterwards is as
safe as the connection: on one host nobody else can get into it, and between hosts the network must
be trusted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._C import _distributed_c10d as c10d

from echelon.comm.buffers import from_bytes
from echelon.comm.secret import NONCE_NBYTES, PROOF_NBYTES, Secret, nonce
from echelon.comm.torch_dist.peers import PeerLost, Peers, collective_tag
from echelon.comm.torch_dist.stores import await_keys
from echelon.diagnosis.collective_call import CallSignature

_NONCES, _PROOFS = (
    collective_tag(CallSignature("nonces"), 0),
    collective_tag(CallSignature("proofs"), 0),
)


def strangers(peers: Peers, secret: Secret, group: str, seconds: float) -> list[int]:
    """The ranks of a group behind whose connections is somebody who does not know the secret.

    Args:
        peers: of a new engine.
        group: a name that no other engine of the job has.
        seconds: how long a peer may take to prove itself.
    """
    others = peers.others
    deadline = time.monotonic() + seconds
    challenges = {peer: nonce() for peer in others}
    try:
        nonces = _exchange(peers, challenges, _NONCES, NONCE_NBYTES, deadline)
        sent_proofs = {
            peer: secret.proof(*_words(group, peers.rank, peer, nonces[peer], challenges[peer]))
            for peer in others
        }
        proofs = _exchange(peers, sent_proofs, _PROOFS, PROOF_NBYTES, deadline)
    except PeerLost as lost:
        peers.stop_waiting()  # a stranger may have let this rank wait in vain
        return sorted(lost.missing) or sorted(others)
    return sorted(
        peer
        for peer in others
        if not secret.is_proof(
            proofs[peer], *_words(group, peer, peers.rank, challenges[peer], nonces[peer])
        )
    )


def _words(
    group: str, prover: int, verifier: int, verifier_nonce: bytes, prover_nonce: bytes
) -> list[bytes]:
    return [
        b"gloo", group.encode(), b"%d" % prover, b"%d" % verifier, verifier_nonce, prover_nonce,
    ]  # fmt: skip


def _exchange(
    peers: Peers, messages: dict[int, bytes], tag: int, nbytes: int, deadline: float
) -> dict[int, bytes]:
    """Send each peer its message; returns the ``nbytes`` bytes that each peer has sent."""
    received = {peer: torch.empty(nbytes, dtype=torch.uint8, device="cpu") for peer in messages}
    sent = list(map(from_bytes, messages.values()))
    works = [peers.recv(tensor, peer, tag) for peer, tensor in received.items()]
    works += [peers.send(data, peer, tag) for peer, data in zip(messages, sent, strict=True)]
    peers.wait(works, deadline)
    return {peer: tensor.numpy().tobytes() for peer, tensor in received.items()}


def conclude(
    store: c10d.Store,
    rank: int,
    size: int,
    seen: Sequence[int],
    timeout: float,
    check: Callable[[], None],
) -> list[int]:
    """The strangers that any rank of a group has seen: the same list on each rank.

    Args:
        store: of one engine of the group, in which ranks trust what they read.
        seen: the strangers that this rank has seen.
        check: raises if there is no use in waiting.

    Raises:
        PeerLost: a rank did not report in time.
    """
    wait = partial(
        await_keys,
        store,
        deadline=time.monotonic() + timeout,
        check=lambda missing: check(),
        time_out=lambda missing: PeerLost(missing, late=True),
    )
    keys = [f"found/{member}" for member in range(size)]
    store.set(keys[rank], json.dumps(list(seen)))
    if rank == 0:
        wait(keys)
        reports = [json.loads(report) for report in store.multi_get(keys)]
        store.set("strangers", json.dumps(sorted({peer for report in reports for peer in report})))
    wait(["strangers"])
    concluded: list[int] = json.loads(store.get("strangers"))
    return concluded
