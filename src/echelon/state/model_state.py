"""The state of a model by the names of the plain model: copies of it, and loading it in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError
from echelon.modules.compiled import plain_keys
from echelon.state.sharded_state import ParameterShards, named_extras


class LoadReport(NamedTuple):
    """Keys of a state dict that do not fit; as ``nn.Module.load_state_dict`` returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def copy_of(value: Any, device: torch.device | None = None) -> Any:
    """A copy of a tensor, on its own device or another; any other value as it is."""
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
    """The state dict of ``module`` with ``copies`` of its parameters, and copies of the rest.

    Args:
        copies: by the ``id`` of the parameter.
    """
    state: dict[str, Any] = module.state_dict(*args, **{**(kwargs or {}), "keep_vars": True})
    for key, value in state.items():
        if isinstance(value, Tensor):
            known = copies.get(id(value))
            state[key] = copy_of(value, device) if known is None else known
    return state


def check_state(given: object) -> None:
    """Refuse what is no state dict."""
    if not isinstance(given, Mapping):
        raise ArgumentError(f"the state is {given!r:.80}; give a dict of tensors by name")


def load_model_state(
    module: nn.Module,
    shards: ParameterShards,
    given: Mapping[str, Any],
    *,
    strict: bool,
    parts: bool = False,
) -> LoadReport:
    """Take this rank's ranges of a state, in place.

    Args:
        parts: whether ``given`` has this rank's ranges and not whole tensors.

    Raises:
        ArgumentError: shapes, dtypes or, if ``strict``, keys do not fit; nothing was loaded.
    """
    check_state(given)
    ranges = {shard.identity: shard for own in shards.by_param.values() for shard in own}
    own = module.state_dict(keep_vars=True)
    given = plain_keys(given)
    report = LoadReport(
        [key for key in own if key not in given], [key for key in given if key not in own]
    )
    targets: dict[str, Tensor] = {}
    wrong = []
    for key, tensor in own.items():
        if key in given and isinstance(tensor, Tensor):
            shard = ranges.get(id(tensor))
            targets[key] = tensor if shard is None else shard.values
            shape = tuple(targets[key].shape) if shard is None or parts else shard.shape
            wrong += [f"{key}: {what}" for what in _misfit(given[key], shape, targets[key].dtype)]
    if strict:
        wrong += [f"{key}: missing" for key in report.missing_keys]
        wrong += [f"{key}: unexpected" for key in report.unexpected_keys]
    if wrong:
        what = (
            "sharded state does not fit this rank's parts" if parts else "state dict does not fit"
        )
        raise ArgumentError(f"the {what}: {'; '.join(sorted(wrong))}")
    shards.before_write()
    with torch.no_grad():
        for key, target in targets.items():
            shard = None if parts else ranges.get(id(own[key]))
            target.copy_(given[key] if shard is None else shard.range_of(given[key]))
    for extra in named_extras(module):
        if extra.name in own and extra.name in given:
            extra.module.set_extra_state(given[extra.name])
    return report


def _misfit(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """What is wrong with a value for a tensor of this shape and dtype; nothing if it fits."""
    if not isinstance(value, Tensor):
        return [f"a {type(value).__name__} instead of a tensor"]
    if tuple(value.shape) != shape:
        return [f"{tuple(value.shape)} instead of {shape}"]
    if not torch.can_cast(value.dtype, dtype):
        return [f"{value.dtype} would lose what {dtype} does not have"]
    return []
