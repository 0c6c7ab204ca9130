"""A rendezvous of one host whose store no other host can reach.

The store of torch's own rendezvous listens on all interfaces whatever its address says, and asks
nobody who they are. Seen in 2.13; https://github.com/pytorch/pytorch/issues/173909. The store of
this one listens on the loopback interface, where users of the host still reach it: it is there for
scripts that make process groups of torch themselves. Neither the agent nor ``echelon.init`` takes
anything from it.
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

from echelon.comm.torch_dist.rendezvous import LOOPBACK, serve_store


@final
class LoopbackRendezvous(RendezvousHandler):
    """What torch's agent needs to start the ranks of this host, and no others.

    Ranks reach the store for process groups of torch at ``MASTER_ADDR`` and ``MASTER_PORT``. The
    agent's own is in its memory.

    Args:
        run_id: names the job; the ranks see it as ``TORCHELASTIC_RUN_ID``.
        timeout: seconds that a call to the store waits.
    """

    def __init__(self, run_id: str, timeout: float = 60.0) -> None:
        self._run_id = run_id
        listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        self._store = serve_store(listener, timeout)
        self._own = c10d.HashStore()
        self._round = 0

    @property
    def use_agent_store(self) -> bool:
        """Ranks use this store and need none of their own."""
        return True

    def get_backend(self) -> str:
        """The name under which torch's agent records it."""
        return "loopback"

    def get_run_id(self) -> str:
        """The name of the job."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet for one attempt: this agent is always the only one."""
        self._round += 1
        store = c10d.PrefixStore(f"agent/{self._round}", self._own)
        address = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(store, 0, 1, address)

    def num_nodes_waiting(self) -> int:
        """Other hosts never come."""
        return 0

    def is_closed(self) -> bool:
        """Whether no attempt can follow: that is up to the agent alone."""
        return False

    def set_closed(self) -> None:
        """Nobody else would hear of it."""

    def shutdown(self) -> bool:
        """The store ends with its process."""
        return True
