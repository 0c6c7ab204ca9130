"""Any process group of ``torch.distributed`` as a ``Group``: gloo, NCCL, MPI, UCC, XCCL.

``start.connect`` opens a store and lets all ranks meet in it (``rendezvous``, ``stores``), then
starts an engine (``engines``) and wraps it in one of two kinds of group. ``group.PeerGroup`` uses
an engine for tagged messages only (``peers``) and has its own ``algorithms``;
``native.NativeGroup`` uses the engine's collectives. ``signature_check`` compares calls; ``job``
finds out who failed; ``stall_watch`` ends calls that a device does not finish.

Authentication: ``rendezvous.meet`` returns the ``comm.secret.Secret`` that all ranks share, and a
store in which nobody else can write unnoticed. That store is either in memory of one user, or
torch's TCP store with each value sealed by the secret (``stores``). ``start`` then calls ``proof``
for each new gloo engine, before any message of a group crosses its connections.
"""

from echelon.comm.torch_dist.engines import backend_for, bound_device
from echelon.comm.torch_dist.group import TorchGroup
from echelon.comm.torch_dist.rendezvous import meet, open_store
from echelon.comm.torch_dist.start import check_wanted, connect, from_process_group

__all__ = [
    "TorchGroup",
    "backend_for",
    "bound_device",
    "check_wanted",
    "connect",
    "from_process_group",
    "meet",
    "open_store",
]
