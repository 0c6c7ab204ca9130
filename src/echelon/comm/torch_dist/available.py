"""Which engines this build of torch has."""

from __future__ import annotations

import torch.distributed as dist


def available_backends() -> list[str]:
    """The backends that ``init`` can be given, besides our own.

    Example:
        >>> "gloo" in available_backends()
        True
    """
    if not dist.is_available():
        return []
    found = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }
    return [name for name, there in found.items() if there]
