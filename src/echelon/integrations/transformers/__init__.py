"""The ``Trainer`` of transformers on the wrappers and checkpoints of this library.

``trainer``                ``EchelonTrainer`` and ``EchelonSeq2SeqTrainer``
``stage_training``         a training step of a pipeline
``trainer_checkpoint``      a folder of ``Trainer`` that exists completely or not at all
``unsupported_arguments``  options and batches that are refused, and why
"""

from echelon.integrations.transformers.trainer import EchelonSeq2SeqTrainer, EchelonTrainer

__all__ = ["EchelonSeq2SeqTrainer", "EchelonTrainer"]
