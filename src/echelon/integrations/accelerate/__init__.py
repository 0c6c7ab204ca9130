"""Accelerate on the groups, wrappers and checkpoints of this library.

``accelerator``            ``EchelonAccelerator``
``process_group_options``  options of PyTorch's groups and DDP: kept, or refused
``state_items``            what an accelerator saves, by name
``uneven_batches``         whether a loader gives some ranks more batches than others
"""

from echelon.integrations.accelerate.accelerator import EchelonAccelerator

__all__ = ["EchelonAccelerator"]
