"""Replicate one model on all ranks of a group and reduce its gradients while backward runs.

``options``             the options of ``DDP``
``buckets``             which gradients are reduced together, and the memory in which they are
``gradient_memory``     the memory of a bucket's gradients, and whether somebody else holds some
``grad_ready_counter``  which gradients of a backward are ready
``reducer``             when a bucket is launched, and the end of a backward
``gradient_state``      whether ``.grad`` holds reduced or local gradients
``replicas``            buffers that are made equal again, and the state that a rank holds
``join``                ranks with different numbers of batches
``replicated_module``   a module of which each rank keeps a copy: its state, its memory
``reports``             what a user can ask about buckets and the last reduction
``api``                 ``DDP`` itself
``ddp_view``            what ``ec.show`` says about it
"""

import echelon.ddp.ddp_view  # noqa: F401  # gives DDP its view
from echelon.ddp.api import DDP

__all__ = ["DDP"]
