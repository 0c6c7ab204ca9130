"""When the next unit of backward is gathered."""

from __future__ import annotations

from enum import Enum


class BackwardPrefetch(Enum):
    """When the next unit of backward is gathered. Where ranks share memory a gather is free.

    The names are those of Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
    Parallel", 2023, section 3.3.2.
    """

    PRE = "before the gradients of the unit before it: most overlap, one unit more is whole"
    POST = "after them"
    NONE = "when backward reaches it"
