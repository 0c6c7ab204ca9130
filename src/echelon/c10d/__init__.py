"""Groups of this library as the backend ``"echelon"`` of ``torch.distributed``.

Importing this package registers the backend. PyTorch's own DDP, FSDP2, DTensor and DCP then run on
processes of one host that communicate through shared memory. On ranks that echelon has started,
simulated ones and processes, it also serves ``"gloo"``, ``"nccl"`` and the others, so that a script
of ``torch.distributed`` runs there as it is.

In reading order::

    served_backends      where ``init_process_group`` and ``new_group`` make our groups
    process_group        a group of this library in the shape of a process group of c10d
    named_process_group  what c10d asks of a process group before it calls it
    translate            reductions, timeouts and lists of tensors in our words
    dist_work            works, futures, and receives from any rank
    sparse_reduction     a sum of sparse tensors
    monitored_barrier    a barrier that names the ranks which do not come
    connection           how ranks of a new process group meet
    group_agreement      whether all ranks make the same group
    default_group        the default group, for libraries that look for one

    simulated_rank       which simulated rank runs now
    simulated_store      stores without a port: one dictionary in memory
    rank_names           what names of ``torch.distributed`` mean to simulated ranks
    rank_variables       the variables of torchrun, as such a rank finds them
    rank_limits          what a program can do as a process, and not as a simulated rank
    rank_saving          asynchronous saves of DCP, which are made at once
    torch_globals        globals of ``torch.distributed`` that each rank has for itself
    library_globals      those of installed libraries

    process_ranks        the same programs in the processes that ``echelon.run`` starts
    process_watch        what such a process tells others of itself
    dtensor_blocks       which block of a ``DTensor`` a rank has
    dcp                  checkpoints of DCP, read and written by one process

Example:
    >>> import torch.distributed as dist
    >>> import echelon.c10d
    >>> # under torchrun: dist.init_process_group("echelon")
"""

from echelon.c10d.named_process_group import BACKEND as BACKEND
from echelon.c10d.process_group import ProcessGroupEchelon as ProcessGroupEchelon

__all__ = ["BACKEND", "ProcessGroupEchelon"]
