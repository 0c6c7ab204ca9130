"""Takes a sharded model apart again: whole parameters, and a wrapper that is of no use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from echelon.errors import StateError
from echelon.fsdp.flat_parameters import show
from echelon.fsdp.hooks import Hooks
from echelon.fsdp.state_dict import copy_parameters
from echelon.fsdp.storage import Storage
from echelon.fsdp.whole_only import unguard_modules
from echelon.modules.elementwise import allow_other_steps
from echelon.modules.parameters import disclaim
from echelon.modules.sharded_gradients import unmarked


def make_whole(module: nn.Module, hooks: Hooks, storages: Sequence[Storage]) -> None:
    """Give each rank whole parameters and gradients in memory of its own. All ranks call it.

    Raises:
        StateError: inside a forward, a backward or ``full_parameters()``.
    """
    if hooks.busy:
        raise StateError(
            "unwrap() inside a forward, a backward or full_parameters(): call it outside"
        )
    values = copy_parameters(hooks)
    gradients = {
        param: gradient
        for storage in storages
        for param, gradient in zip(storage.params, _whole_gradients(storage), strict=True)
    }
    hooks.rest("gradients were copied")
    hooks.leave(module)
    hooks.detach()
    unguard_modules(module)
    for storage in storages:
        show(storage.params)
        disclaim([*storage.params, *storage.exposed])
        allow_other_steps([*storage.params, *storage.exposed])
    for param, gradient in gradients.items():
        param.grad = None
        param.data = values[id(param)]
        param.grad = gradient


def _whole_gradients(storage: Storage) -> list[Tensor | None]:
    """The gradient of each parameter, put together; None where there is none."""
    parts: list[Tensor | None] = [
        None if param.grad is None else unmarked(param.grad) for param in storage.exposed
    ]
    if storage.is_flat and parts[0] is not None:
        parts = [*parts[0].split([piece.numel for piece in storage.own])]
    elif storage.is_flat:
        parts = [None] * len(storage.params)
    with torch.no_grad():
        return [
            None
            if part is None
            else storage.assembled(i, part, label=f"gradient of {member.name}").view(
                storage.cut.shapes[i]
            )
            for i, (part, member) in enumerate(zip(parts, storage.members, strict=True))
        ]


@final
class Detached:
    """Stands where a wrapper had what it works with, after ``unwrap()``."""

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error()

    def __iter__(self) -> NoReturn:
        raise self._error()

    def __getitem__(self, key: Any) -> NoReturn:
        raise self._error()

    def _error(self) -> StateError:
        return StateError("this FSDP was taken off its module by unwrap(): wrap the module again")
