"""The state of an optimizer, by the names of parameters, in ranges like those of the parameters.

A state of the shape of its parameter is cut as the parameter is. A tensor without dims, such as
``step``, is a number of its parameter. Any other tensor belongs to a parameter that is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint.part import Json, Part
from echelon.errors import ArgumentError, CheckpointCorrupt, UnsupportedError
from echelon.state.tensor_shard import Replication, TensorShard
from echelon.values.decoding import decode
from echelon.values.encoding import encode
from echelon.values.untrusted_json import brief
from echelon.values.value_types import DTYPES, dtype_name

# By parameter: the ranges that it stands for, under their names in the checkpoint.
Owners = Mapping[nn.Parameter, tuple[TensorShard, ...]]

_LIKE, _WHOLE, _NUMBER = "$like", "$whole", "$number"


@final
class State(NamedTuple):
    """One entry of the state of one parameter.

    Attributes:
        param: its parameter.
        key: such as ``"exp_avg"``.
        value: a tensor or a number.
        like: whether it has one number for each element of the parameter.
    """

    param: nn.Parameter
    key: str
    value: Any
    like: bool


def optimizer_part(name: str, optimizer: Optimizer, owners: Owners) -> Part:
    """What this rank saves of an optimizer.

    Raises:
        ArgumentError: it has a parameter of no model that is saved with it, or a value that cannot
            be saved.
        UnsupportedError: a state belongs to a parameter of which this rank has a part only, and is
            not cut like it.
    """
    ranges = ranges_of(name, optimizer, owners)
    state: dict[str, dict[str, Json]] = {}
    tensors: list[TensorShard] = []
    for one in states_of(optimizer):
        for held, facts, values in _pieces(name, one, ranges[one.param]):
            state.setdefault(held.name, {})[one.key] = facts
            if values is not None:
                tensors.append(values)
    groups = [
        {
            "options": options_of(name, i, group),
            "params": [held.name for param in group["params"] for held in ranges[param]],
        }
        for i, group in enumerate(optimizer.param_groups)
    ]
    own = [held.name for held in _all(ranges) if held.replication is Replication.PER_RANK]
    facts = {"class": type(optimizer).__name__, "groups": groups, "state": state, "own": own}
    return Part(kind="optimizer", facts=facts, tensors=tuple(tensors))


def ranges_of(name: str, optimizer: Optimizer, owners: Owners) -> Owners:
    """The ranges of the parameters of an optimizer.

    Raises:
        ArgumentError: one is of no model that is saved or loaded with it, or a state is of none.
        UnsupportedError: a state is not one value for each name.
    """
    found = {}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param in owners:
                found[param] = owners[param]
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


def states_of(optimizer: Optimizer) -> Iterator[State]:
    """All entries of the state, parameter by parameter.

    Whether a tensor without dims is a number shows only where the parameter has dims; for one that
    has none, the other parameters tell.
    """
    entries = [
        (param, key, value) for param, own in optimizer.state.items() for key, value in own.items()
    ]
    with_dims = [(key, value) for param, key, value in entries if param.dim()]
    many = {key for key, value in with_dims if isinstance(value, Tensor) and value.dim()}
    numbers = {key for key, value in with_dims if key not in many} | {"step"} - many
    for param, key, value in entries:
        assert isinstance(param, nn.Parameter)
        like = isinstance(value, Tensor) and value.shape == param.shape
        yield State(param, key, value, like and (param.dim() > 0 or key not in numbers))


def _pieces(
    name: str, one: State, ranges: Sequence[TensorShard]
) -> Iterator[tuple[TensorShard, Json, TensorShard | None]]:
    """For each range of the parameter, what is to be noted of the entry, and its values."""
    if not isinstance(one.value, Tensor):
        found, tensors = encode(one.value, f"{name}.state.{one.key}")
        if tensors:
            raise ArgumentError(f"{name}.state.{one.key} holds tensors inside of a container")
        yield from ((held, found, None) for held in ranges)
    elif one.like:
        flat = one.value if len(ranges) == 1 else one.value.view(-1)
        ends = _ends(ranges)
        for held, stop in zip(ranges, ends, strict=True):
            values = flat if len(ranges) == 1 else flat[stop - held.numel : stop]
            names = tuple(state_name(name, param, one.key) for param in held.names)
            facts = {_LIKE: dtype_name(one.value.dtype)}
            yield held, facts, replace(held, names=names, values=values.detach())
    elif not one.value.dim():
        number, _ = encode(one.value.item(), f"{name}.state.{one.key}")
        yield from (
            (held, {_NUMBER: [dtype_name(one.value.dtype), number]}, None) for held in ranges
        )
    else:
        yield from _whole(name, one, ranges)


def _whole(
    name: str, one: State, ranges: Sequence[TensorShard]
) -> Iterator[tuple[TensorShard, Json, TensorShard | None]]:
    """A tensor of a shape of its own, such as the row means of Adafactor."""
    if len(ranges) != 1 or not ranges[0].is_whole:
        raise UnsupportedError(
            f"state {one.key!r} of {ranges[0].name!r} in {name!r} has shape "
            f"{tuple(one.value.shape)}, which is not cut like its parameter, of which this rank "
            "has a part only: keep such parameters whole (min_num_params, or DDP)"
        )
    held = ranges[0]
    shape = tuple(one.value.shape)
    names = (state_name(name, held.name, one.key),)
    facts = {_WHOLE: dtype_name(one.value.dtype)}
    yield held, facts, replace(held, names=names, shape=shape, values=one.value.detach())


def _ends(ranges: Sequence[TensorShard]) -> list[int]:
    ends, end = [], 0
    for held in ranges:
        end += held.numel
        ends.append(end)
    return ends


def _all(ranges: Owners) -> Iterator[TensorShard]:
    return (held for own in ranges.values() for held in own)


def state_name(name: str, param: str, key: str) -> str:
    """The name in the checkpoint of a state of a parameter."""
    return f"{name}/{param}/{key}"


def options_of(name: str, i: int, group: Mapping[str, Any]) -> Json:
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
class Tensorial:
    """A state that is a tensor in the checkpoint.

    Attributes:
        like: whether it is cut like its parameter.
        dtype: as saved.
    """

    like: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, found: Json) -> Tensorial | None:
        """What the facts of a state say; None if it is no tensor."""
        if isinstance(found, dict):
            for key in (_LIKE, _WHOLE):
                if key in found:
                    return cls(key == _LIKE, DTYPES[found[key]])
        return None
