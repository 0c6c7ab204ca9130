"""The state of an optimizer in a checkpoint, in ranges like those of its parameters.

A state per element is sharded as its parameter is. A tensor without dims, such as ``step``, is a
number of its parameter. Any other tensor belongs to a parameter that is whole.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint.load_plan import LoadPlan
from echelon.checkpoint.sections import Json, Section
from echelon.checkpoint.tensors import is_ordinary
from echelon.errors import ArgumentError, CheckpointCorrupt, CheckpointError, UnsupportedError
from echelon.state.optimizer_state import (
    StateEntry,
    entries_of,
    install_states,
    names_by_group,
    saved_group,
)
from echelon.state.sharded_state import ShardsByParam
from echelon.state.tensor_shard import Replication, TensorShard
from echelon.values.decoding import decode
from echelon.values.encoding import encode
from echelon.values.untrusted_json import brief
from echelon.values.value_types import DTYPES, dtype_name

_LIKE, _WHOLE, _NUMBER = "$like", "$whole", "$number"  # ``sections`` says what they are

# Saving --------------------------------------------------------------------------------------


def optimizer_section(name: str, optimizer: Optimizer, shards: ShardsByParam) -> Section:
    """What this rank saves of an optimizer.

    Raises:
        ArgumentError: it has a parameter of no model that is saved with it, or a value that cannot
            be saved.
        UnsupportedError: a state belongs to a parameter of which this rank has a part only, and is
            not sharded like it.
    """
    ranges = ranges_of(name, optimizer, shards)
    alone = {own[0] for own in ranges.values() if len(own) == 1}  # the others are flat
    state: dict[str, dict[str, Json]] = {}
    tensors: list[TensorShard] = []
    for entry in entries_of(optimizer, ranges):
        facts, values = _saved(name, entry, is_alone=entry.shard in alone)
        state.setdefault(entry.shard.name, {})[entry.key] = facts
        if values is not None:
            tensors.append(values)
    groups = [
        {"options": _saved_options(name, i, group), "params": names}
        for i, (group, names) in enumerate(
            zip(optimizer.param_groups, names_by_group(optimizer, ranges), strict=True)
        )
    ]
    per_rank = [
        shard.name
        for own in ranges.values()
        for shard in own
        if shard.replication is Replication.PER_RANK
    ]
    facts = {"class": type(optimizer).__name__, "groups": groups, "state": state, "own": per_rank}
    return Section(kind="optimizer", facts=facts, tensors=tuple(tensors))


def ranges_of(name: str, optimizer: Optimizer, shards: ShardsByParam) -> ShardsByParam:
    """The ranges of the parameters of an optimizer.

    Raises:
        ArgumentError: one is of no model that is saved or loaded with it, or a state is of none.
        UnsupportedError: a state is not one value for each name.
    """
    found = {}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param in shards:
                found[param] = shards[param]
            elif optimizer.state.get(param) or param.requires_grad:
                raise ArgumentError(
                    f"group {i} of {name!r} has a parameter of shape {tuple(param.shape)} that is "
                    "in no model given with it: give the model that the optimizer was made for"
                )
            else:
                found[param] = ()
    for owner, own in optimizer.state.items():
        if owner not in found:
            raise ArgumentError(
                f"{name!r} has a state of {_described(owner)} that is in none of its groups: put "
                "it back into one, or take its state out of optimizer.state"
            )
        if not isinstance(own, Mapping) or not all(type(key) is str for key in own):
            raise UnsupportedError(
                f"{name!r} keeps {own!r:.80} as the state of {_described(owner)}: a checkpoint "
                "takes a dict whose keys are names"
            )
    return found


def _described(owner: object) -> str:
    if isinstance(owner, Tensor):
        return f"a parameter of shape {tuple(owner.shape)}"
    return f"{owner!r:.80}"


def _saved(name: str, entry: StateEntry, *, is_alone: bool) -> tuple[Json, TensorShard | None]:
    """What is noted of an entry, and its values if they are a tensor in the checkpoint.

    Args:
        is_alone: whether its range is all that the optimizer's parameter is.
    """
    shard, key, value, per_element = entry
    where = f"{name}.state.{key}"
    if not isinstance(value, Tensor):
        facts, tensors = encode(value, where)
        if tensors:
            raise ArgumentError(f"{where} holds tensors inside of a container")
        return facts, None
    dtype = dtype_name(value.dtype)
    if per_element:
        names = tuple(_state_name(name, param, key) for param in shard.names)
        return {_LIKE: dtype}, replace(shard, names=names, values=value.detach())
    if not value.dim():
        return {_NUMBER: [dtype, encode(value.item(), where)[0]]}, None
    # A tensor of a shape of its own, such as the row means of Adafactor.
    shape = tuple(value.shape)
    if not is_alone or not shard.is_whole:
        raise UnsupportedError(
            f"state {key!r} of {shard.name!r} in {name!r} has shape {shape}, which is not cut "
            "like its parameter, of which this rank has a part only: keep such parameters whole "
            "(min_num_params, or DDP)"
        )
    names = (_state_name(name, shard.name, key),)
    return {_WHOLE: dtype}, replace(shard, names=names, shape=shape, values=value.detach())


def _state_name(name: str, param: str, key: str) -> str:
    """The name in the checkpoint of a state of a parameter."""
    return f"{name}/{param}/{key}"


def _saved_options(name: str, i: int, group: Mapping[str, Any]) -> Json:
    """The options of a group, without its parameters."""
    options: dict[str, Json] = {}
    for key, value in group.items():
        if key not in ("params", "param_names"):
            where = f"{name}.param_groups[{i}].{key}"
            if isinstance(value, Tensor) and not value.dim():
                number, _ = encode(value.item(), where)
                options[key] = {_NUMBER: [dtype_name(value.dtype), number]}
                continue
            options[key], tensors = encode(value, where)
            if tensors:
                raise ArgumentError(f"{where} is a tensor with dims; give a number")
    return options


# Loading --------------------------------------------------------------------------------------


def number_of(found: Json, where: str, device: torch.device) -> Any:
    """A number or a tensor without dims, as it was saved.

    Raises:
        CheckpointCorrupt: it is none.
    """
    if not isinstance(found, dict) or _NUMBER not in found:
        return decode(found, {}, where)
    dtype, saved = found[_NUMBER]
    number = decode(saved, {}, where)
    if isinstance(number, int | float | complex):
        try:
            return torch.tensor(number, dtype=DTYPES[dtype], device=device)
        except (RuntimeError, TypeError, OverflowError):
            pass  # a number that this dtype does not have
    raise CheckpointCorrupt(f"has {brief(saved)} for a number of {dtype}", where)


@final
@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A state that is a tensor in the checkpoint.

    Attributes:
        like: whether it is cut like its parameter.
        dtype: as saved.
    """

    like: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, found: Json) -> TensorFacts | None:
        """What the facts of a state say; None if it is no tensor."""
        if isinstance(found, dict):
            for key in (_LIKE, _WHOLE):
                if key in found:
                    return cls(key == _LIKE, DTYPES[found[key]])
        return None


@final
class OptimizerLoader:
    """One optimizer and what a step has of it.

    Args:
        name: in the checkpoint.
        section: its facts.
        shards: the ranges of all parameters.
        plan: where its tensors are noted.
    """

    @torch.inference_mode(mode=False)  # steps will write what is made here
    def __init__(
        self, name: str, optimizer: Optimizer, section: Json, shards: ShardsByParam, plan: LoadPlan
    ) -> None:
        self._name, self._optimizer, self._plan = name, optimizer, plan
        self._section = section
        ranges = ranges_of(name, optimizer, shards)
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
                f"{self._name} does not take its state: {error!r:.200}", self._plan.path
            ) from error

    def undo(self) -> None:
        """Let the optimizer be as it was before ``install``."""
        if self._before is not None:
            # What it has is replaced by it, never changed.
            vars(self._optimizer).clear()
            vars(self._optimizer).update(self._before)

    def _install(self) -> None:
        install_states(self._optimizer, self._states, self._options)
        for param, own in self._states.items():  # torch casts to the dtype of the parameter
            for key, value in own.items():
                if isinstance(value, Tensor):
                    state = self._optimizer.state[param]
                    cast = state.get(key)
                    is_number = isinstance(cast, Tensor) and not value.dim()
                    state[key] = value.to(cast.device) if is_number else value

    def _match(self, ranges: ShardsByParam) -> list[dict[str, Any]]:
        """For each group the options of the saved one that has its parameters."""
        saved = self._section["groups"]
        known = {param for group in saved for param in group["params"]}
        chosen: list[dict[str, Any]] = []
        groups = self._optimizer.param_groups
        for i, own in enumerate(names_by_group(self._optimizer, ranges)):
            names = set(own)
            where = f"{self._name}.param_groups[{i}]"
            self._plan.used |= {f"{self._name}/{name}" for name in names & known}
            self._plan.missing += [f"{self._name}/{name}" for name in sorted(names - known)]
            same = saved_group(names & known, i, saved)
            if same is None:
                self._plan.differing[where] = (
                    f"no group of the checkpoint has its {len(names)} parameters together"
                )
            options = {
                key: number_of(value, f"{self._plan.path}: {where}.{key}", torch.device("cpu"))
                for key, value in ({} if same is None else same["options"]).items()
            }
            chosen.append({**_options(groups[i]), **options})
        return chosen

    def _state_of(self, param: nn.Parameter, own: Sequence[TensorShard]) -> dict[str, Any] | None:
        """The state of what an optimizer has; None where the step has none."""
        entries = [self._entries(shard.name) for shard in own]
        first = entries[0]
        if any(one != first for one in entries):
            other = next(h.name for h, one in zip(own, entries, strict=True) if one != first)
            self._plan.differing[f"{self._name}/{own[0].name}"] = (
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
            if self._plan.same_size:
                found: Mapping[str, Json] | None = apart[self._plan.rank]
                return found
            self._plan.apart.append(f"{self._name}/{param}")
        entries: Mapping[str, Json] | None = states["values"].get(param)
        return entries

    def _value(self, param: nn.Parameter, own: Sequence[TensorShard], key: str, facts: Json) -> Any:
        tensor = TensorFacts.of(facts)
        if tensor is None:
            where = f"{self._plan.path}: {self._name}.state.{key}"
            return number_of(facts, where, torch.device("cpu"))
        if not tensor.like:
            return self._whole(param, own[0], key, tensor)
        wanted = [
            replace(shard, names=tuple(_state_name(self._name, n, key) for n in shard.names))
            for shard in own
        ]
        fitting = [shard for shard in wanted if self._plan.fits(shard.names, shard.shape)]
        live = self._optimizer.state.get(param, {}).get(key)
        is_live = (
            isinstance(live, Tensor)
            and (live.shape, live.dtype) == (param.shape, tensor.dtype)
            and is_ordinary(live)
        )
        values: Tensor = param  # nothing is written where nothing fits
        if is_live:
            values = live
        elif fitting:
            self._plan.claim(sum(shard.numel for shard in fitting) * tensor.dtype.itemsize)
            values = torch.empty_like(param, dtype=tensor.dtype)
        values = values.detach()
        end = 0
        for shard in wanted:
            part = values if len(own) == 1 else values.view(-1)[end : end + shard.numel]
            self._plan.place(replace(shard, values=part), fresh=not is_live)
            end += shard.numel
        return values

    def _whole(
        self, param: nn.Parameter, shard: TensorShard, key: str, tensor: TensorFacts
    ) -> Tensor | None:
        """Memory for a state of a shape of its own, which is read later."""
        name = _state_name(self._name, shard.name, key)
        saved = self._plan.find([name])
        if saved is None or not shard.is_whole:
            problem = "is not in the checkpoint" if saved is None else "cannot be cut"
            self._plan.differing[name] = problem
            return None
        self._plan.claim(prod(saved.shape) * tensor.dtype.itemsize)
        values = torch.empty(saved.shape, dtype=tensor.dtype, device=param.device)
        whole = replace(shard, names=(name,), shape=saved.shape, start=0, values=values)
        self._plan.place(whole, fresh=True)
        return values


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
