"""Whether somebody else refers to memory that a wrapper is about to write over.

After ``zero_grad()`` plain torch makes new gradients, and leaves the earlier ones to whoever keeps
them. A wrapper whose gradients lie in memory of its own uses that memory again only if nobody holds
one of them, or a view or an array of one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor


def count_references(flat: Tensor, views: Sequence[Tensor]) -> list[int]:
    """Count the references to ``views`` of ``flat``, and to the memory of both.

    Counts that differ from those of the owner alone show that somebody else holds some of it.
    """
    memory = torch._C._storage_Use_Count(flat.untyped_storage()._cdata)
    tensors = map(Tensor._use_count, views)  # type: ignore[attr-defined]
    return [memory, *map(sys.getrefcount, views), *tensors]
