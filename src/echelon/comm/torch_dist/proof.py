"""Ranks prove to one another that they are of one job, before anything else crosses a connection.

A gloo connection belongs to whoever connects first and says a small number. So over each new one
both ends show that they know the secret of the job, without sending it::

    rank a                                              rank b
    nonce of a for b          ───────────────────>
                              <───────────────────      nonce of b for a
    proof(group, a, b, nonce of b, nonce of a) ──>
                              <──  proof(group, b, a, nonce of a, nonce of b)

A proof is of one direction, one group and two numbers that were never used before: one that was
recorded, or sent back to its sender, proves nothing. What a rank sends afterwards is as safe as the
connection: on one host nobody else gets into it, over a network the network must be safe.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from echelon.comm.secret import NONCE_NBYTES, PROOF_NBYTES, Secret, nonce
from echelon.comm.torch_dist.peers import PeerLost, Peers, collective_tag
from echelon.diagnosis.collective_call import CallSignature

_NONCES, _PROOFS = (
    collective_tag(CallSignature("nonces"), 0),
    collective_tag(CallSignature("proofs"), 0),
)
_SLICE_S = 0.1


def strangers(peers: Peers, secret: Secret, group: str, seconds: float) -> list[int]:
    """The ranks of a group behind whose connections is somebody who does not know the secret.

    Args:
        peers: of a new engine.
        group: its name, another one for each engine of the job.
        seconds: what a peer gets to prove itself.
    """
    others = peers.others()
    deadline = time.monotonic() + seconds
    mine = {peer: nonce() for peer in others}
    try:
        theirs = _exchange(peers, mine, _NONCES, NONCE_NBYTES, deadline)
        words = {peer: _words(group, peers.rank, peer, theirs[peer], mine[peer]) for peer in others}
        proofs = {peer: secret.proof(*words[peer]) for peer in others}
        found = _exchange(peers, proofs, _PROOFS, PROOF_NBYTES, deadline)
    except PeerLost as lost:
        return sorted(lost.missing) or sorted(others)
    return sorted(
        peer
        for peer in others
        if not secret.is_proof(
            found[peer], *_words(group, peer, peers.rank, mine[peer], theirs[peer])
        )
    )


def _words(group: str, sender: int, receiver: int, theirs: bytes, mine: bytes) -> list[bytes]:
    return [b"gloo", group.encode(), b"%d" % sender, b"%d" % receiver, theirs, mine]


def _exchange(
    peers: Peers, mine: dict[int, bytes], tag: int, nbytes: int, deadline: float
) -> dict[int, bytes]:
    """What each peer sent for this rank, for what this one sends to each."""
    received: dict[int, Tensor] = {peer: torch.empty(nbytes, dtype=torch.uint8) for peer in mine}
    sent = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in mine.values()]
    works = [peers.recv(tensor, peer, tag) for peer, tensor in received.items()]
    works += [peers.send(data, peer, tag) for peer, data in zip(mine, sent, strict=True)]
    peers.wait(works, deadline)
    return {peer: tensor.numpy().tobytes() for peer, tensor in received.items()}


def conclude(
    store: c10d.Store,
    rank: int,
    size: int,
    found: Sequence[int],
    timeout: float,
    check: Callable[[], None],
) -> list[int]:
    """What all ranks of a group have found together: the same on each of them.

    Args:
        store: of one engine of the group, in which ranks trust what they read.
        found: strangers, as this rank sees it.
        timeout: seconds to wait for the others.
        check: raises if there is no use in waiting.

    Raises:
        PeerLost: a rank did not come.
    """
    end = time.monotonic() + timeout
    keys = [f"found/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps(list(found)))
    if rank == 0:
        _await(store, keys, end, check)
        everyone = sorted({r for one in store.multi_get(keys) for r in json.loads(one)})
        store.set("strangers", json.dumps(everyone))
    _await(store, ["strangers"], end, check)
    concluded: list[int] = json.loads(store.get("strangers"))
    return concluded


def _await(store: c10d.Store, keys: list[str], end: float, check: Callable[[], None]) -> None:
    pause_s = 0.0005
    while not store.check(keys):
        if pause_s == _SLICE_S:  # it asks for each rank
            check()
        if time.monotonic() > end:
            missing = [i for i, key in enumerate(keys) if not store.check([key])]
            raise PeerLost(tuple(missing), late=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _SLICE_S)
