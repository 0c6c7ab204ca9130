"""Accelerate's ``kwargs_handlers`` for process groups and DDP of PyTorch: kept, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)

from echelon.errors import UnsupportedError

# Our DDP knows which parameters got no gradient, and keeps gradients as views.
_WITHOUT_EFFECT = {"find_unused_parameters", "gradient_as_bucket_view", "static_graph"}


def timeout_of(handlers: Sequence[KwargsHandler] | None) -> float | None:
    """How many seconds a rank waits for others, where ``InitProcessGroupKwargs`` says so."""
    for handler in handlers or ():
        if isinstance(handler, InitProcessGroupKwargs) and handler.timeout is not None:
            return handler.timeout.total_seconds()
    return None


def check_ddp_options(handler: DistributedDataParallelKwargs | None) -> None:
    """Refuse options of PyTorch's DDP that would do nothing here and change what it does."""
    if handler is None:
        return
    defaults = DistributedDataParallelKwargs()
    names = [each.name for each in fields(handler) if each.name not in _WITHOUT_EFFECT]
    given = [name for name in names if getattr(handler, name) != getattr(defaults, name)]
    if given:
        raise UnsupportedError(
            f"DistributedDataParallelKwargs has {', '.join(given)}, which PyTorch's DDP would "
            "read: give options of ec.DDP, such as options={'gradient_dtype': torch.float16}"
        )
