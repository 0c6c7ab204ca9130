"""The whole state of a sharded model: copied unit by unit, loaded part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError
from echelon.fsdp.storage import Storage
from echelon.fsdp.unit import Unit

__all__ = ["LoadReport", "copy_parameters", "load_state", "whole_state"]


class LoadReport(NamedTuple):
    """Keys of a state dict that do not fit; as ``nn.Module.load_state_dict`` returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def copy_parameters(units: Sequence[Unit]) -> dict[int, Tensor]:
    """Copies of all parameters, by their ``id``; one unit is whole at a time."""
    copies: dict[int, Tensor] = {}
    for unit in units:
        unit.gather()
        for storage in unit.storages:
            for param, value in zip(storage.params, storage.copies(), strict=True):
                copies[id(param)] = value
        unit.release()
    return copies


def whole_state(
    module: nn.Module, copies: Mapping[int, Tensor], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """The state dict of ``module`` with ``copies`` of its parameters, and copies of the rest."""
    state = module.state_dict(*args, **{**kwargs, "keep_vars": True})
    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = copies[id(value)] if id(value) in copies else value.detach().clone()
    return state


def load_state(
    module: nn.Module, storages: Sequence[Storage], given: Mapping[str, Any], *, strict: bool
) -> LoadReport:
    """Take this rank's parts of a whole state, in place.

    Raises:
        ArgumentError: shapes or, if ``strict``, keys do not fit; nothing was loaded.
    """
    homes = {
        id(param): (storage, i) for storage in storages for i, param in enumerate(storage.params)
    }
    own = module.state_dict(keep_vars=True)
    report = LoadReport(
        [key for key in own if key not in given], [key for key in given if key not in own]
    )
    shared = [key for key, value in own.items() if key in given and isinstance(value, Tensor)]
    wrong = []
    for key in shared:
        home = homes.get(id(own[key]))
        expected = tuple(own[key].shape) if home is None else home[0].cut.shapes[home[1]]
        if tuple(given[key].shape) != expected:
            wrong.append(f"{key}: {tuple(given[key].shape)} instead of {expected}")
    if strict:
        wrong += [f"{key}: missing" for key in report.missing_keys]
        wrong += [f"{key}: unexpected" for key in report.unexpected_keys]
    if wrong:
        raise ArgumentError(f"the state dict does not fit: {'; '.join(sorted(wrong))}")
    with torch.no_grad():
        for key in shared:
            home = homes.get(id(own[key]))
            if home is None:
                own[key].copy_(given[key])
                continue
            storage, i = home
            storage.adopt_one(i, given[key])
    return report
