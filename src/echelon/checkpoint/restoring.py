"""Optimizers that take back their states: first memory for them, then, when it is filled, all."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint.fitting import Fitting
from echelon.checkpoint.optimizers import Owners, Tensorial, number_of, ranges_of, state_name
from echelon.checkpoint.part import Json
from echelon.checkpoint.tensors import is_ordinary
from echelon.errors import CheckpointError
from echelon.state.tensor_shard import TensorShard


@final
class Restoring:
    """One optimizer and what a step has of it.

    Args:
        name: in the checkpoint.
        section: its facts.
        owners: the ranges of all parameters.
        fitting: where its tensors are noted.
    """

    @torch.inference_mode(mode=False)  # steps will write what is made here
    def __init__(
        self, name: str, optimizer: Optimizer, section: Json, owners: Owners, fitting: Fitting
    ) -> None:
        self._name, self._optimizer, self._fitting = name, optimizer, fitting
        self._section = section
        ranges = ranges_of(name, optimizer, owners)
        self._options = self._match(ranges)
        self._states: dict[nn.Parameter, dict[str, Any]] = {}
        self._before: dict[str, Any] | None = None
        for param, own in ranges.items():
            if own:
                state = self._state_of(param, own)
                if state is not None:
                    self._states[param] = state

    @torch.inference_mode(mode=False)
    def install(self) -> None:
        """Give the optimizer its options and states. The memory of new ones is filled by now.

        Raises:
            CheckpointError: it does not take them.
        """
        self._before = dict(vars(self._optimizer))
        try:
            self._install()
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._name} does not take its state: {error!r:.200}", self._fitting.path
            ) from error

    def undo(self) -> None:
        """Let the optimizer be as it was before ``install``."""
        if self._before is not None:
            # What it has is replaced by it, never changed.
            vars(self._optimizer).clear()
            vars(self._optimizer).update(self._before)

    def _install(self) -> None:
        optimizer = self._optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        numbers = {param: i for i, param in enumerate(params)}
        # In the form of torch, which runs the optimizer's own hooks.
        optimizer.load_state_dict(
            {
                "state": {numbers[param]: dict(own) for param, own in self._states.items()},
                "param_groups": [
                    {**options, "params": [numbers[param] for param in group["params"]]}
                    for options, group in zip(self._options, optimizer.param_groups, strict=True)
                ],
            }
        )
        for param, own in self._states.items():  # torch casts to the dtype of the parameter
            for key, value in own.items():
                if isinstance(value, Tensor):
                    cast = optimizer.state[param].get(key)
                    number = isinstance(cast, Tensor) and not value.dim()
                    optimizer.state[param][key] = value.to(cast.device) if number else value

    def _match(self, ranges: Owners) -> list[dict[str, Any]]:
        """For each group the options of the saved one that has its parameters."""
        saved = self._section["groups"]
        known = {param for group in saved for param in group["params"]}
        chosen: list[dict[str, Any]] = []
        for i, group in enumerate(self._optimizer.param_groups):
            names = {held.name for param in group["params"] for held in ranges[param]}
            where = f"{self._name}.param_groups[{i}]"
            self._fitting.used |= {f"{self._name}/{name}" for name in names & known}
            self._fitting.missing += [f"{self._name}/{name}" for name in sorted(names - known)]
            same = next((one for one in saved if names & known <= set(one["params"])), None)
            if not names and i < len(saved):
                same = saved[i]
            if same is None:
                self._fitting.differing[where] = (
                    f"no group of the checkpoint has its {len(names)} parameters together"
                )
                chosen.append({key: v for key, v in group.items() if key != "params"})
                continue
            options = {
                key: number_of(value, f"{self._fitting.path}: {where}.{key}", torch.device("cpu"))
                for key, value in same["options"].items()
            }
            chosen.append({**_options(group), **options})
        return chosen

    def _state_of(self, param: nn.Parameter, own: Sequence[TensorShard]) -> dict[str, Any] | None:
        """The state of what an optimizer has; None where the step has none."""
        entries = [self._entries(held.name) for held in own]
        first = entries[0]
        if any(one != first for one in entries):
            other = next(h.name for h, one in zip(own, entries, strict=True) if one != first)
            self._fitting.differing[f"{self._name}/{own[0].name}"] = (
                f"its state differs from that of {other!r}, and both are one flat parameter here, "
                "which has one state: wrap with use_orig_params=True"
            )
            return None
        if first is None:
            return None
        return {key: self._value(param, own, key, facts) for key, facts in first.items()}

    def _entries(self, param: str) -> Mapping[str, Json] | None:
        states = self._section["state"]
        apart = states["by_rank"].get(param)
        if apart is not None:
            if self._fitting.same_size:
                found: Mapping[str, Json] | None = apart[self._fitting.rank]
                return found
            self._fitting.apart.append(f"{self._name}/{param}")
        entries: Mapping[str, Json] | None = states["values"].get(param)
        return entries

    def _value(self, param: nn.Parameter, own: Sequence[TensorShard], key: str, facts: Json) -> Any:
        tensorial = Tensorial.of(facts)
        if tensorial is None:
            where = f"{self._fitting.path}: {self._name}.state.{key}"
            return number_of(facts, where, torch.device("cpu"))
        live = self._optimizer.state.get(param, {}).get(key)
        if not tensorial.like:
            return self._whole(param, own[0], key, tensorial)
        names = [tuple(state_name(self._name, name, key) for name in held.names) for held in own]
        wanted = [
            held.numel
            for held, of_state in zip(own, names, strict=True)
            if self._fitting.fits(of_state, held.shape)
        ]
        is_live = (
            isinstance(live, Tensor)
            and (live.shape, live.dtype) == (param.shape, tensorial.dtype)
            and is_ordinary(live)
        )
        values: Tensor = param  # nothing is written where nothing fits
        if is_live:
            values = live
        elif wanted:
            self._fitting.claim(sum(wanted) * tensorial.dtype.itemsize)
            values = torch.empty_like(param, dtype=tensorial.dtype)
        values = values.detach()
        end = 0
        for held, of_state in zip(own, names, strict=True):
            part = values if len(own) == 1 else values.view(-1)[end : end + held.numel]
            self._fitting.place(replace(held, names=of_state, values=part), fresh=not is_live)
            end += held.numel
        return values

    def _whole(self, param: nn.Parameter, held: TensorShard, key: str, tensorial: Tensorial) -> Any:
        name = state_name(self._name, held.name, key)
        saved = self._fitting.find([name])
        if saved is None or not held.is_whole:
            problem = "is not in the checkpoint" if saved is None else "cannot be cut"
            self._fitting.differing[name] = problem
            return None
        self._fitting.claim(prod(saved.shape) * tensorial.dtype.itemsize)
        values = torch.empty(saved.shape, dtype=tensorial.dtype, device=param.device)
        place = replace(held, names=(name,), shape=saved.shape, start=0, values=values)
        self._fitting.place(place, fresh=True)
        return values


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
