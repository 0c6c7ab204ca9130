"""Any process group of ``torch.distributed`` as a ``Group``: gloo, NCCL, MPI, UCC, XCCL.

``start`` makes groups from a ``rendezvous``; ``group`` and ``native`` are the two kinds of them.
The first uses an engine for tagged messages only (``peers``) and has its own ``algorithms``, the
second uses the engine's collectives. ``signature_check`` compares calls; ``job`` finds out
who failed.
"""

from echelon.comm.torch_dist.group import TorchGroup
from echelon.comm.torch_dist.rendezvous import meet, open_store
from echelon.comm.torch_dist.start import check_wanted, connect, from_process_group

__all__ = ["TorchGroup", "check_wanted", "connect", "from_process_group", "meet", "open_store"]
