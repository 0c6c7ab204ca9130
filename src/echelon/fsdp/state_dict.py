"""Copies of a sharded model's parameters, whole or this rank's parts, and hooks that load them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError, StateError
from echelon.fsdp.hooks import Hooks
from echelon.fsdp.storage import Storage, wait_for_unshards
from echelon.modules.compiled import plain_name
from echelon.state.model_state import copy_of


class Home(NamedTuple):
    """Where a parameter lives: its storage, and its place there."""

    storage: Storage
    i: int


def homes_of(storages: Sequence[Storage]) -> dict[int, Home]:
    """Where every parameter of a unit lives, by the ``id`` of the parameter."""
    return {
        id(param): Home(storage, i)
        for storage in storages
        for i, param in enumerate(storage.params)
    }


# Saving --------------------------------------------------------------------------------------


def copy_parameters(
    hooks: Hooks, *, keep: bool = True, device: torch.device | None = None
) -> dict[int, Tensor]:
    """Whole copies of all parameters, by their ``id``; one unit is whole at a time.

    All ranks call it.

    Args:
        keep: whether this rank wants them; if not, it helps the others and returns nothing.
        device: where the copies go; None: where the parts are.

    Raises:
        StateError: inside a forward or a backward.
    """
    if hooks.busy and not hooks.pinned:
        raise StateError("the whole state inside a forward or a backward: ask for it outside")
    if not hooks.pinned:  # inside full_parameters() all units are whole, and stay so
        hooks.publish_shards()
    copies: dict[int, Tensor] = {}
    for unit in hooks.units:
        was_unsharded = unit.is_unsharded
        if any(map(_shows_its_values, unit.storages)):
            unit.unshard()
        for storage in unit.storages:
            for i, param in enumerate(storage.params):
                value = _whole_value(storage, i)
                if keep:
                    copies[id(param)] = copy_of(value, device or storage.shards[i].device)
        if not was_unsharded:
            unit.reshard()
    hooks.wait_for_readers("the state was copied")
    return copies


def _shows_its_values(storage: Storage) -> bool:
    """Whether whole parameters are the parts put together, not rounded to a dtype of compute."""
    return storage.sharded and storage.compute_dtype == storage.dtype


def _whole_value(storage: Storage, i: int) -> Tensor:
    """A whole parameter in its own dtype."""
    if not storage.sharded:
        return storage.shards[i]
    if _shows_its_values(storage):
        return storage.unsharded[i]
    label = f"state of {storage.members[i].name}"
    return storage.gather_tensor(i, storage.shards[i], label=label)


def copy_parts(storages: Sequence[Storage]) -> dict[int, Tensor]:
    """Copies of this rank's parts, by the ``id`` of their parameter."""
    return {
        id(param): part.detach().clone()
        for storage in storages
        for param, part in zip(storage.params, storage.shards, strict=True)
    }


# Loading -------------------------------------------------------------------------------------


def part_loader(storages: Sequence[Storage], module: nn.Module) -> Callable[..., None]:
    """A hook that leads whole values to the parts where a larger module loads its state.

    There PyTorch itself copies, and looks for the wrapped module under the name ``module``. What
    does not fit is left as it is, for PyTorch to name.
    """

    def hook(
        _: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: object
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise no_assign()
        wait_for_unshards(storages)
        homes = homes_of(storages)
        own = module.state_dict(keep_vars=True)
        for key in [key for key in state if key.startswith(prefix)]:
            value, plain = state.pop(key), plain_name(key.removeprefix(prefix))
            home = homes.get(id(own.get(plain)))
            if home is not None and isinstance(value, Tensor):
                shape = home.storage.layout.shapes[home.i]
                if tuple(value.shape) == shape:
                    value = home.storage.shard_of(home.i, value)
            state[f"{prefix}module.{plain}"] = value

    return hook


def no_assign() -> ArgumentError:
    """What ``assign=True`` gets."""
    return ArgumentError(
        "load_state_dict(assign=True) would replace the parameters that FSDP shards: "
        "use assign=False"
    )
