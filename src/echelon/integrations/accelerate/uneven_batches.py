"""Loaders of Accelerate that give some ranks more batches than others: ``even_batches=False``."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from accelerate.data_loader import BatchSamplerShard


def are_batches_uneven(loader: Any) -> bool:
    """Whether some ranks get a batch more than others in an epoch; all ranks get one answer.

    A sampler whose length is not known counts as even.
    """
    shards = getattr(loader, "batch_sampler", None)
    while not isinstance(shards, BatchSamplerShard):  # such as one that skips batches
        if shards is None:
            return False
        shards = getattr(shards, "batch_sampler", None)
    batches, num_ranks = shards.batch_sampler, shards.num_processes
    if shards.even_batches or shards.drop_last:
        return False
    if not shards.split_batches:
        return isinstance(batches, Sized) and len(batches) % num_ranks != 0
    rows = getattr(batches, "sampler", None)
    if not isinstance(rows, Sized):
        return False
    num_rows_last = len(rows) % shards.batch_size
    return 0 < num_rows_last <= shards.batch_size // num_ranks * (num_ranks - 1)
