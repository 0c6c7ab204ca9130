"""The state of an optimizer in a checkpoint, in ranges like those of its parameters.

A state per element is sharded as its parameter is. A tensor without dims, such as ``step``, is a
number of its parameter. Any other tensor belongs to a parameter that this rank has as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint.load_plan import LoadPlan, ReadItem
from echelon.checkpoint.sections import Json, Section
from echelon.checkpoint.tensors import is_ordinary
from echelon.errors import ArgumentError, CheckpointCorrupt, CheckpointError, UnsupportedError
from echelon.state.optimizer_state import (
    StateEntry,
    entries_of,
    group_options,
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

# The keys of entries in a section; the docstring of ``sections`` specifies them.
_PER_ELEMENT, _OTHER_SHAPE, _NUMBER = "$like", "$whole", "$number"

_LEFT_OUT: Final = object()  # in the place of a state that does not fit; None is a value

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
    unflattened = {members[0] for members in ranges.values() if len(members) == 1}
    state: dict[str, dict[str, Json]] = {}
    tensors: list[TensorShard] = []
    for entry in entries_of(optimizer, ranges):
        facts, values = _saved(name, entry, is_unflattened=entry.shard in unflattened)
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
        for members in ranges.values()
        for shard in members
        if shard.replication is Replication.PER_RANK
    ]
    facts = {"class": type(optimizer).__name__, "groups": groups, "state": state, "own": per_rank}
    return Section(kind="optimizer", facts=facts, tensors=tuple(tensors))


def ranges_of(name: str, optimizer: Optimizer, shards: ShardsByParam) -> ShardsByParam:
    """The ranges of the parameters of an optimizer.

    Raises:
        ArgumentError: a parameter is of no model that is saved or loaded with the optimizer, or a
            state is of no parameter.
        UnsupportedError: a state is not one value for each name.
    """
    ranges: dict[nn.Parameter, tuple[TensorShard, ...]] = {}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param in shards:
                ranges[param] = shards[param]
            elif optimizer.state.get(param) or param.requires_grad:
                raise ArgumentError(
                    f"group {i} of {name!r} has a parameter of shape {tuple(param.shape)} that is "
                    "in no model given with it: give the model that the optimizer was made for"
                )
            else:
                ranges[param] = ()  # nothing of a frozen parameter without state is saved
    for owner, state in optimizer.state.items():
        if owner not in ranges:
            raise ArgumentError(
                f"{name!r} has a state of {_described(owner)} that is in none of its groups: put "
                "it back into one, or take its state out of optimizer.state"
            )
        if not isinstance(state, Mapping) or not all(type(key) is str for key in state):
            raise UnsupportedError(
                f"{name!r} keeps {state!r:.80} as the state of {_described(owner)}: a checkpoint "
                "takes a dict whose keys are names"
            )
    return ranges


def _described(owner: object) -> str:
    if isinstance(owner, Tensor):
        return f"a parameter of shape {tuple(owner.shape)}"
    return f"{owner!r:.80}"


def _saved(
    name: str, entry: StateEntry, *, is_unflattened: bool
) -> tuple[Json, TensorShard | None]:
    """What the section says of an entry, and its values if they are a tensor in the checkpoint."""
    shard, key, value, per_element = entry
    where = f"{name}.state.{key}"
    if not isinstance(value, Tensor):
        facts, tensors = encode(value, where)
        if tensors:
            raise ArgumentError(f"{where} holds tensors inside of a container")
        return facts, None
    dtype = dtype_name(value.dtype)
    if per_element:
        values = replace(_renamed(shard, name, key), values=value.detach())
        return {_PER_ELEMENT: dtype}, values
    if not value.dim():
        return {_NUMBER: [dtype, encode(value.item(), where)[0]]}, None
    # A tensor of another shape, such as the row means of Adafactor.
    shape = tuple(value.shape)
    if not is_unflattened or not shard.is_whole:
        raise UnsupportedError(
            f"state {key!r} of {shard.name!r} in {name!r} has shape {shape}, which is not cut "
            "like its parameter, of which this rank has a part only: keep such parameters whole "
            "(min_num_params, or DDP)"
        )
    names = (_state_name(name, shard.name, key),)
    return {_OTHER_SHAPE: dtype}, replace(shard, names=names, shape=shape, values=value.detach())


def _state_name(name: str, param: str, key: str) -> str:
    """The name in the checkpoint of a state of a parameter."""
    return f"{name}/{param}/{key}"


def _renamed(shard: TensorShard, name: str, key: str) -> TensorShard:
    """A range of a parameter under the names that its state has in the checkpoint."""
    return shard.renamed(lambda param: _state_name(name, param, key))


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


def number_of(facts: Json, where: str) -> Any:
    """A Python value, or a tensor without dims on the CPU, as it was saved.

    Raises:
        CheckpointCorrupt: the facts are of neither.
    """
    if not isinstance(facts, dict) or _NUMBER not in facts:
        return decode(facts, {}, where)
    dtype, saved = facts[_NUMBER]
    number = decode(saved, {}, where)
    if isinstance(number, int | float | complex):
        try:
            return torch.tensor(number, dtype=DTYPES[dtype], device="cpu")
        except (RuntimeError, TypeError, OverflowError):
            pass  # this dtype does not have the number
    raise CheckpointCorrupt(f"has {brief(saved)} for a number of {dtype}", where)


@final
@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A state that is a tensor in the checkpoint.

    Attributes:
        per_element: whether it is sharded like its parameter.
        dtype: of the saved tensor.
    """

    per_element: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, facts: Json) -> TensorFacts | None:
        """What the facts of a state say; None if the state is no tensor in the checkpoint."""
        if isinstance(facts, dict):
            for key in (_PER_ELEMENT, _OTHER_SHAPE):
                if key in facts:
                    return cls(key == _PER_ELEMENT, DTYPES[facts[key]])
        return None


@final
class OptimizerLoader:
    """Loads the state of one optimizer from a step.

    Law: a parameter gets all of its saved state or none of it, unless the optimizer has a state of
    that shape already, of which then only the ranges that fit are read.

    Args:
        name: in the checkpoint.
        section: the facts that were saved.
        shards: the ranges of all parameters.
        plan: takes note of the tensors to read.
    """

    @torch.inference_mode(mode=False)  # Later steps write into the memory that is made here.
    def __init__(
        self, name: str, optimizer: Optimizer, section: Json, shards: ShardsByParam, plan: LoadPlan
    ) -> None:
        self._name, self._optimizer, self._plan = name, optimizer, plan
        self._section = section
        ranges = ranges_of(name, optimizer, shards)
        self._options = self._match(ranges)
        self._states: dict[nn.Parameter, dict[str, Any]] = {}
        self._before: dict[str, Any] | None = None
        for param, members in ranges.items():
            if members:
                state = self._state_of(param, members)
                if state is not None:
                    self._states[param] = state

    @torch.inference_mode(mode=False)
    def install(self) -> None:
        """Give the optimizer its options and states, whose new memory has been filled before.

        Raises:
            CheckpointError: the optimizer does not take them.
        """
        self._before = dict(vars(self._optimizer))
        try:
            self._install()
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._name} does not take its state: {error!r:.200}", self._plan.path
            ) from error

    def undo(self) -> None:
        """Restore what the optimizer had before ``install``, which replaces and never mutates."""
        if self._before is not None:
            vars(self._optimizer).clear()
            vars(self._optimizer).update(self._before)

    def _install(self) -> None:
        install_states(self._optimizer, self._states, self._options)
        for param, state in self._states.items():  # torch casts to the dtype of the parameter
            installed = self._optimizer.state[param]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    cast = installed.get(key)
                    is_number = isinstance(cast, Tensor) and not value.dim()
                    installed[key] = value.to(cast.device) if is_number else value

    def _match(self, ranges: ShardsByParam) -> list[dict[str, Any]]:
        """For each group the options of the saved one that has its parameters."""
        saved = self._section["groups"]
        known = {param for group in saved for param in group["params"]}
        chosen: list[dict[str, Any]] = []
        for i, members in enumerate(names_by_group(self._optimizer, ranges)):
            names = set(members)
            where = f"{self._name}.param_groups[{i}]"
            self._plan.used |= {f"{self._name}/{name}" for name in names & known}
            self._plan.missing += [f"{self._name}/{name}" for name in sorted(names - known)]
            group = saved_group(names & known, i, saved)
            if group is None:
                self._plan.differing[where] = (
                    f"no group of the checkpoint has its {len(names)} parameters together"
                )
            options = {
                key: number_of(value, f"{self._plan.path}: {where}.{key}")
                for key, value in ({} if group is None else group["options"]).items()
            }
            chosen.append({**group_options(self._optimizer.param_groups[i]), **options})
        return chosen

    def _state_of(
        self, param: nn.Parameter, members: Sequence[TensorShard]
    ) -> dict[str, Any] | None:
        """The state of a parameter with its members; None if the step has none that fits."""
        first = self._entries(members[0].name)
        for shard in members[1:]:
            if self._entries(shard.name) != first:
                self._leave_out(
                    members,
                    f"its state differs from that of {shard.name!r}, and both are one flat "
                    "parameter here, which has one state: wrap with use_orig_params=True",
                )
                return None
        if first is None:
            return None
        state = {key: self._value(param, members, key, facts) for key, facts in first.items()}
        if all(value is not _LEFT_OUT for value in state.values()):
            return state
        if len(members) > 1:
            self._leave_out(
                members,
                "it is part of a flat parameter, which gets no state because that of another "
                "part does not fit: wrap with use_orig_params=True",
            )
        return None

    def _leave_out(self, members: Sequence[TensorShard], problem: str) -> None:
        self._plan.differing[f"{self._name}/{members[0].name}"] = problem

    def _entries(self, param: str) -> Mapping[str, Json] | None:
        """What the section says of the states of a parameter, by key; None if it has none."""
        states = self._section["state"]
        by_rank = states["by_rank"].get(param)
        if by_rank is not None and not self._plan.same_size:
            self._plan.not_restored.append(f"{self._name}/{param}")
            by_rank = None
        entries: Mapping[str, Json] | None
        entries = states["values"].get(param) if by_rank is None else by_rank[self._plan.rank]
        return entries

    def _value(
        self, param: nn.Parameter, members: Sequence[TensorShard], key: str, facts: Json
    ) -> Any:
        """A state, with memory that is read later if it is a tensor with dims."""
        tensor = TensorFacts.of(facts)
        if tensor is None:
            return number_of(facts, f"{self._plan.path}: {self._name}.state.{key}")
        if not tensor.per_element:
            return self._value_of_other_shape(param, members[0], key, tensor.dtype)
        sources = [
            self._plan.source_of(_renamed(shard, self._name, key), tensor.dtype)
            for shard in members
        ]
        live = self._optimizer.state.get(param, {}).get(key)
        is_live = (
            isinstance(live, Tensor)
            and (live.shape, live.dtype) == (param.shape, tensor.dtype)
            and is_ordinary(live)
        )
        if is_live:
            values = live.detach()
        elif None in sources:
            return _LEFT_OUT
        else:
            self._plan.count_new_memory(
                sum(shard.numel for shard in members) * tensor.dtype.itemsize
            )
            values = torch.empty_like(param, dtype=tensor.dtype).detach()
        items = self._plan.live if is_live else self._plan.fresh
        parts = [values]
        if len(members) > 1:
            parts = list(values.view(-1).split([shard.numel for shard in members]))
        for shard, saved, part in zip(members, sources, parts, strict=True):
            if saved is not None:
                items.append(ReadItem(saved, shard.start, part))
        return values

    def _value_of_other_shape(
        self, param: nn.Parameter, shard: TensorShard, key: str, dtype: torch.dtype
    ) -> Any:
        """Memory for a state that is not shaped like its parameter, which is read later."""
        name = _state_name(self._name, shard.name, key)
        saved, saved_param = self._plan.find([name]), self._plan.find(shard.names)
        problem = None
        if saved is None:
            problem = "is not in the checkpoint"
        elif not shard.is_whole:
            problem = "cannot be cut"
        elif saved_param is not None and saved_param.shape != shard.shape:
            problem = f"is of a parameter saved as {list(saved_param.shape)}"
        if saved is None or problem is not None:
            self._plan.differing[name] = str(problem)
            return _LEFT_OUT
        source = self._plan.source_of(replace(shard, names=(name,), shape=saved.shape), dtype)
        if source is None:
            return _LEFT_OUT
        self._plan.count_new_memory(prod(saved.shape) * dtype.itemsize)
        values = torch.empty(saved.shape, dtype=dtype, device=param.device)
        self._plan.fresh.append(ReadItem(source, 0, values))
        return values
