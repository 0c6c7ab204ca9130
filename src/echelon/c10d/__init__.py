"""Groups of this library as the backend ``"echelon"`` of ``torch.distributed``.

Importing this package registers the backend. PyTorch's own DDP, FSDP2, DTensor and DCP then run on
processes of one host that communicate through shared memory.

Example:
    >>> import torch.distributed as dist
    >>> import echelon.c10d
    >>> # under torchrun: dist.init_process_group("echelon")
"""

from echelon.c10d.named_process_group import BACKEND as BACKEND
from echelon.c10d.process_group import ProcessGroupEchelon as ProcessGroupEchelon

__all__ = ["BACKEND", "ProcessGroupEchelon"]
