"""One backward: what is known while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from echelon.comm.work import Work
from echelon.modules.autograd import Token


@final
@dataclass(slots=True)
class BackwardHook:
    """One backward, or one call of ``sync_gradients``.

    Attributes:
        token: gives None when it is over or was aborted.
        synced: whether it reduces.
        num_contributors: ranks that have a batch of their own in it.
        works: the communication of the buckets that left, in order.
        missing: for each of those, the slots without a gradient here.
        olds: what was set aside, by index of the parameter.
    """

    token: Callable[[], Token | None]
    synced: bool
    num_contributors: int = 0
    works: list[Work | None] = field(default_factory=list)
    missing: list[Sequence[int]] = field(default_factory=list)
    olds: dict[int, Tensor] = field(default_factory=dict)
