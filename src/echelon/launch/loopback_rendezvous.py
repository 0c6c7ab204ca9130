"""The rendezvous of torch's agent on one host, whose store no other host can reach.

The store of torch's own rendezvous listens on all interfaces whatever its address says, and
authenticates nobody (seen in 2.13; https://github.com/pytorch/pytorch/issues/173909). This store
listens on the loopback interface, where users of the host still reach it. It exists for scripts
that make process groups of torch themselves; neither the agent nor ``echelon.init`` reads it.
"""

from __future__ import annotations

import socket
from typing import final

from torch._C import _distributed_c10d as c10d
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from echelon.comm.torch_dist.engines import LOOPBACK
from echelon.comm.torch_dist.rendezvous import serve_store


@final
class LoopbackRendezvous(RendezvousHandler):
    """What torch's agent needs to start the ranks of this host, and no others.

    Ranks reach the store for process groups of torch at ``MASTER_ADDR`` and ``MASTER_PORT``. The
    agent's own store is in its memory.

    Args:
        run_id: names the job; the ranks see it as ``TORCHELASTIC_RUN_ID``.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        self._store = serve_store(listener, timeout=60.0)
        self._agent_store = c10d.HashStore()
        self._round = 0

    @property
    def use_agent_store(self) -> bool:
        """Ranks use this store and need none of their own."""
        return True

    def get_backend(self) -> str:
        """The name under which torch's agent records this rendezvous."""
        return "loopback"

    def get_run_id(self) -> str:
        """The name of the job."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin an attempt, of which this agent is always the only member."""
        self._round += 1
        store = c10d.PrefixStore(f"agent/{self._round}", self._agent_store)
        address = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(store, 0, 1, address)

    def num_nodes_waiting(self) -> int:
        """The number of other hosts that wait to join, which is always 0."""
        return 0

    def is_closed(self) -> bool:
        """Whether no attempt can follow: False, because the agent alone decides that."""
        return False

    def set_closed(self) -> None:
        """Do nothing, because no other agent would hear of it."""

    def shutdown(self) -> bool:
        """The store ends with its process."""
        return True
