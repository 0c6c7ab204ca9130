"""The signature check: every rank shows its call to every other one before anything is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.buffers import from_bytes
from echelon.comm.torch_dist.peers import Peers, collective_tag
from echelon.diagnosis.collective_call import CallSignature, CollectiveCall, fingerprint
from echelon.errors import CollectiveMismatch
from echelon.errors.message_text import printable, text_bytes

_TEXT_NBYTES = 1024
# The calls may differ, so the tags of the check depend on the position alone.
_CALL, _TEXT = CallSignature("check of the call"), CallSignature("text of the call")


@final
class SignatureCheck:
    """Compares the calls of all ranks, at the price of one round of small messages a call.

    ``ranks`` are those of the group in the job, by which errors name them.
    """

    def __init__(self, peers: Peers, ranks: Sequence[int]) -> None:
        self._peers, self._ranks = peers, ranks  # in the job

    def check(
        self, call: CollectiveCall, lengths: tuple[list[int], list[int]] | None = None
    ) -> None:
        """Return when all ranks have issued the call of ``call``.

        Args:
            lengths: elements sent to and expected from each rank, where ranks may differ in them.

        Raises:
            CollectiveMismatch: on every rank, if any two differ; shows the calls of all.
            PeerLost: a rank did not come.
        """
        size = self._peers.size
        sends, expects = lengths or ([], [])
        zeros = [0] * size
        signed = fingerprint(call.signature) - (1 << 63)  # a 64-bit tensor has a sign
        local = torch.tensor(
            [signed, *(sends or zeros), *(expects or zeros)], dtype=torch.int64, device="cpu"
        )
        rows = self._show(local, collective_tag(_CALL, call.position))
        differs = any(not torch.equal(row[:1], local[:1]) for row in rows)
        if not differs:
            table = torch.stack(rows)
            sent, expected = table[:, 1 : 1 + size], table[:, 1 + size :]
            if torch.equal(sent, expected.t()):
                return
        text = _describe(call, sends, expects)
        shown = self._show(text, collective_tag(_TEXT, call.position))
        calls = {self._ranks[rank]: _read(row) for rank, row in enumerate(shown)}
        raise CollectiveMismatch(call.group, call.position, calls)

    def _show(self, local: Tensor, tag: int) -> list[Tensor]:
        """The tensor of every rank, in rank order."""
        peers = self._peers
        rows = [
            local if rank == peers.rank else torch.empty_like(local) for rank in range(peers.size)
        ]
        deadline = peers.deadline()
        posted = [peers.recv(rows[peer], peer, tag) for peer in peers.others]
        posted += [peers.send(local, peer, tag) for peer in peers.others]
        peers.wait(posted, deadline)
        return rows


def _describe(call: CollectiveCall, sends: list[int], expects: list[int]) -> Tensor:
    """The call and its place as a tensor of fixed length."""
    lengths = f", sends {sends}, expects {expects} elements" if sends else ""
    text = text_bytes(f"{call.signature}{lengths} at {call.place}")
    if len(text) > _TEXT_NBYTES:
        text = text[: _TEXT_NBYTES - 3] + b"..."
    return from_bytes(text.ljust(_TEXT_NBYTES, b"\0"))


def _read(row: Tensor) -> str:
    return printable(row.numpy().tobytes().rstrip(b"\0").decode(errors="replace"))
