"""The state of a model by the names of the plain model: making copies, and loading in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError
from echelon.errors.message_text import misfit_text
from echelon.modules.compiled import plain_keys
from echelon.state.sharded_state import ParameterShards, named_extras
from echelon.state.state_copy import as_copy


class LoadReport(NamedTuple):
    """Keys of a state dict that do not fit, as ``nn.Module.load_state_dict`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def copy_of(value: Any, device: torch.device | None = None) -> Any:
    """A copy of a tensor, on its own device or another; any other value is returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device or value.device, copy=True)


def state_of_copies(
    module: nn.Module,
    copies: Mapping[int, Tensor],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """The state dict of ``module`` with ``copies``, by ``id`` of parameters; the rest is copied.

    All copies refuse to be written into. What a given ``destination`` has already is left as it is.
    """
    named = {**(kwargs or {}), "keep_vars": True}
    given = dict(named.get("destination") or (args[0] if args else None) or {})
    state: dict[str, Any] = module.state_dict(*args, **named)
    marked = {key: as_copy(value) for key, value in copies.items()}
    for key, value in state.items():
        if isinstance(value, Tensor) and given.get(key) is not value:
            known = marked.get(id(value))
            state[key] = as_copy(copy_of(value, device)) if known is None else known
    return state


def check_state(state: object) -> None:
    """Refuse what is no state dict."""
    if not isinstance(state, Mapping):
        raise ArgumentError(f"the state is {state!r:.80}; give a dict of tensors by name")


def load_model_state(
    module: nn.Module,
    shards: ParameterShards,
    state: Mapping[str, Any],
    *,
    strict: bool,
    parts: bool = False,
) -> LoadReport:
    """Load this rank's ranges of a state in place.

    Args:
        parts: whether ``state`` has this rank's ranges and not full tensors.

    Raises:
        ArgumentError: shapes, dtypes or, if ``strict``, keys do not fit; nothing was loaded.
    """
    check_state(state)
    ranges = {shard.identity: shard for members in shards.by_param.values() for shard in members}
    current = module.state_dict(keep_vars=True)
    state = plain_keys(state)
    report = LoadReport(
        [key for key in current if key not in state], [key for key in state if key not in current]
    )
    targets: dict[str, Tensor] = {}
    wrong = []
    for key, tensor in current.items():
        if key in state and isinstance(tensor, Tensor):
            shard = ranges.get(id(tensor))
            targets[key] = tensor if shard is None else shard.values
            shape = tuple(targets[key].shape) if shard is None or parts else shard.shape
            wrong += [f"{key}: {what}" for what in _misfit(state[key], shape, targets[key].dtype)]
    names: tuple[list[str], list[str]] = (
        (report.missing_keys, report.unexpected_keys) if strict else ([], [])
    )
    if wrong or any(names):
        what = (
            "sharded state does not fit this rank's parts" if parts else "state dict does not fit"
        )
        raise ArgumentError(f"the {what}: {misfit_text(*names, wrong)}")
    shards.before_write()
    with torch.no_grad():
        for key, target in targets.items():
            shard = None if parts else ranges.get(id(current[key]))
            target.copy_(state[key] if shard is None else shard.range_of(state[key]))
    for extra in named_extras(module):
        if extra.name in current and extra.name in state:
            extra.module.set_extra_state(state[extra.name])
    return report


def _misfit(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """Why a value does not fit a tensor of this shape and dtype; empty if it does."""
    if not isinstance(value, Tensor):
        return [f"a {type(value).__name__} instead of a tensor"]
    if tuple(value.shape) != shape:
        return [f"{tuple(value.shape)} instead of {shape}"]
    if not torch.can_cast(value.dtype, dtype):
        return [f"{value.dtype} would lose what {dtype} does not have"]
    return []
