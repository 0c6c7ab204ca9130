"""The state of an optimizer in a checkpoint, in ranges like those of its parameters.

A state per element is sharded as its parameter is. A tensor without dims, such as ``step``, is a
number of its parameter. Any other tensor belongs to a parameter that this rank has as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint.sections import Json, Section
from echelon.errors import ArgumentError, CheckpointCorrupt, UnsupportedError
from echelon.state.optimizer_state import (
    StateEntry,
    entries_of,
    extra_state,
    names_by_group,
)
from echelon.state.sharded_state import ShardsByParam
from echelon.state.tensor_shard import Replication, TensorShard
from echelon.values.decoding import decode
from echelon.values.encoding import encode
from echelon.values.untrusted_json import brief
from echelon.values.value_types import DTYPES, dtype_name

# The keys of entries in a section; the docstring of ``sections`` specifies them.
_PER_ELEMENT, _OTHER_SHAPE, _NUMBER, _NUMBERS = "$like", "$whole", "$number", "$numbers"

# Saving --------------------------------------------------------------------------------------


def optimizer_section(name: str, optimizer: Optimizer, shards: ShardsByParam) -> Section:
    """What this rank saves of an optimizer.

    Raises:
        ArgumentError: it has a parameter of no model that is saved with it, or a value that cannot
            be saved.
        UnsupportedError: a state belongs to a parameter of which this rank has a part only, and is
            not sharded like it; or ``state_dict()`` of the optimizer has what cannot be saved.
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
    if extra := extra_state(optimizer):
        facts["extra"], _ = encode(extra, f"{name}.state_dict()")
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
        return {_PER_ELEMENT: dtype}, replace(renamed(shard, name, key), values=value.detach())
    if not value.dim():
        return {_NUMBER: _number(value, where)}, None
    # A tensor of another shape, such as the row means of Adafactor.
    shape = tuple(value.shape)
    if not is_unflattened or not shard.is_whole:
        raise UnsupportedError(
            f"state {key!r} of {shard.name!r} in {name!r} has shape {shape}, which is not cut "
            "like its parameter, of which this rank has a part only: keep such parameters whole "
            "(min_num_params, or DDP)"
        )
    names = (state_name(name, shard.name, key),)
    return {_OTHER_SHAPE: dtype}, replace(shard, names=names, shape=shape, values=value.detach())


def state_name(name: str, param: str, key: str) -> str:
    """The name in the checkpoint of a state of a parameter."""
    return f"{name}/{param}/{key}"


def renamed(shard: TensorShard, name: str, key: str) -> TensorShard:
    """A range of a parameter under the names that its state has in the checkpoint."""
    return shard.renamed(lambda param: state_name(name, param, key))


def _saved_options(name: str, i: int, group: Mapping[str, Any]) -> Json:
    """The options of a group, without its parameters."""
    options: dict[str, Json] = {}
    for key, value in group.items():
        if key not in ("params", "param_names"):
            where = f"{name}.param_groups[{i}].{key}"
            facts, tensors = encode(value, where)
            if any(tensor.dim() for tensor in tensors.values()):
                raise ArgumentError(f"{where} is or holds a tensor with dims; give a number")
            if isinstance(value, Tensor):
                facts = {_NUMBER: _number(value, where)}
            elif tensors:
                numbers = {path: _number(tensor, where) for path, tensor in tensors.items()}
                facts = {_NUMBERS: [facts, numbers]}
            options[key] = facts
    return options


def _number(value: Tensor, where: str) -> Json:
    return [dtype_name(value.dtype), encode(value.item(), where)[0]]


# Loading --------------------------------------------------------------------------------------


def number_of(facts: Json, where: str) -> Any:
    """A Python value, or a tensor without dims on the CPU, as it was saved.

    Raises:
        CheckpointCorrupt: the facts are of neither.
    """
    if isinstance(facts, dict) and _NUMBER in facts:
        return _tensor_of(facts[_NUMBER], where)
    tensors: dict[str, Tensor] = {}
    if isinstance(facts, dict) and _NUMBERS in facts:
        facts, numbers = facts[_NUMBERS]
        tensors = {path: _tensor_of(number, where) for path, number in numbers.items()}
    return decode(facts, tensors, where)


def _tensor_of(number_facts: Json, where: str) -> Tensor:
    dtype, saved = number_facts
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
