"""What an accelerator saves: everything that was prepared or registered, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer


def state_items(accelerator: Accelerator) -> dict[str, Any]:
    """The arguments of ``ec.save`` and ``ec.load``.

    The first of a kind is ``model``, the second ``model_1``, and so on in the order of preparation.
    Data loaders have a state only with ``use_stateful_dataloader``.
    """
    loaders = accelerator._dataloaders if accelerator.use_stateful_dataloader else ()
    return {
        **_numbered("model", accelerator._models),
        **_numbered("optimizer", map(plain_optimizer, accelerator._optimizers)),
        **_numbered("scheduler", accelerator._schedulers),
        **_numbered("loader", loaders),
        **_numbered("registered", accelerator._custom_objects),
    }


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of those that Accelerate has put around it."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _numbered(kind: str, items: Iterable[Any]) -> dict[str, Any]:
    return {f"{kind}_{place}" if place else kind: item for place, item in enumerate(items)}
