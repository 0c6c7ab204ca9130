"""One backward: what is known while it runs, and how its end, good or bad, is seen."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from echelon.world.work import Work

__all__ = ["Backward", "Token", "queue_end"]


@final
class Token:
    """Lives as long as one backward.

    The callback that the engine calls at the end owns it, and the engine drops the callback when
    backward raises. So a dead token says that a backward is over, without a call from the user.
    """

    __slots__ = ("__weakref__",)


@final
@dataclass(slots=True)
class Backward:
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


def queue_end(end: Callable[[], None] | None) -> Callable[[], Token | None]:
    """Have the engine call ``end`` when the backward that runs now is complete.

    Returns:
        A reference to a token that dies with this backward. No frame but this one holds the
        token, so that an exception's traceback does not keep it alive.
    """
    token = Token()

    def callback(token: Token = token) -> None:
        if end is not None:
            end()

    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(token)
