"""Accelerate on the groups, wrappers and checkpoints of this library.

``accelerator``    ``EchelonAccelerator``
``state_items``    what an accelerator saves, by name
"""

from echelon.integrations.accelerate.accelerator import EchelonAccelerator

__all__ = ["EchelonAccelerator"]
