"""The state of an optimizer over a sharded model, by the names of parameters.

::

    {"state": {name: {key: whole tensor or number}},
     "param_groups": [{"lr": ..., "params": [names]}]}

It is what an optimizer over the plain model holds, so neither the number of ranks nor the way
units are cut shows in it. A tensor without dims, such as ``step``, is a number of its parameter;
every other tensor has one number for each element of its parameter, and is cut as that is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon import checks
from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError, UnsupportedError
from echelon.fsdp.state_dict import Home, homes_of
from echelon.fsdp.storage import Storage
from echelon.modules.compiled import plain_name

Shape = tuple[int, ...]
_Plain = int | float | bool | str | None


class _Param(NamedTuple):
    """A parameter of an optimizer.

    Attributes:
        name: in the model.
        param: the object that the optimizer has; a flat one stands for several of these.
        home: where its parts are; None if it is in no unit.
    """

    name: str
    param: nn.Parameter
    home: Home | None

    @property
    def is_flat(self) -> bool:
        """Whether the optimizer has a flat parameter in its place."""
        return self.home is not None and self.home.storage.is_flat

    @property
    def shape(self) -> Shape:
        """Of the whole parameter."""
        if self.home is None:
            return tuple(self.param.shape)
        return self.home.storage.cut.shapes[self.home.i]

    @property
    def part_shape(self) -> Shape:
        """Of what this rank keeps of it."""
        if self.home is None:
            return tuple(self.param.shape)
        return tuple(self.home.storage.locals[self.home.i].shape)


# Saving --------------------------------------------------------------------------------------


def gather_optimizer_state(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    storages: Sequence[Storage],
    group: Group,
) -> dict[str, Any]:
    """The whole state of ``optimizer``, by name, as copies. All ranks call it.

    Raises:
        ArgumentError: a parameter of the optimizer is not in the model.
        UnsupportedError: a state on some rank is not one number for each element of its parameter.
        StateError: the optimizers of the ranks hold different states.
    """
    groups = _params(optimizer, module, storages)
    found = [
        (one, key, value)
        for params in groups
        for one in params
        for key, value in _cut(one, optimizer.state.get(one.param, {}))
    ]
    _agree(found, group)
    state: dict[str, dict[str, Any]] = {}
    for one, key, value in found:
        state.setdefault(one.name, {})[key] = _whole(one, key, value)
    return {
        "state": state,
        "param_groups": [
            {**_options(own), "params": [one.name for one in params]}
            for own, params in zip(optimizer.param_groups, groups, strict=True)
        ],
    }


def _cut(one: _Param, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The state of a parameter; of a flat one, what belongs to this piece of it."""
    for key, value in state.items():
        if one.is_flat and isinstance(value, Tensor) and value.shape == one.param.shape:
            assert one.home is not None
            pieces = value.split([piece.numel for piece in one.home.storage.own])
            yield key, pieces[one.home.i].view(one.part_shape)
        else:
            yield key, value


def _agree(found: Sequence[tuple[_Param, str, Any]], group: Group) -> None:
    """See to it that all ranks will gather the same tensors, or raise on all of them."""
    problems = [text for one, key, value in found if (text := _problem(one, key, value))]
    kinds = [
        f"{key!r} of {one.name!r} ({value.dtype if isinstance(value, Tensor) else 'a number'})"
        for one, key, value in found
    ]
    everyone: list[tuple[list[str], list[str]]] = group.all_gather_object((problems, kinds))
    for rank, (wrong, _) in enumerate(everyone):
        if wrong:
            raise UnsupportedError(
                f"the optimizer's {wrong[0]} on rank {rank}: a state must be a number, or one "
                "number for each element, to be put together from parts"
            )
    first = everyone[0][1]
    for rank, (_, others) in enumerate(everyone):
        if others != first:
            only = sorted(set(others) ^ set(first))[:1] or ["their order"]
            raise StateError(
                f"the optimizers of ranks 0 and {rank} hold different states: {only[0]} is on one "
                "of them only. Step the same optimizer on all ranks"
            )


def _problem(one: _Param, key: str, value: Any) -> str | None:
    """Why a state cannot be put together; None if it can."""
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        if not shape or shape == one.part_shape:
            return None
        return f"state {key!r} of {one.name!r} has shape {shape}, its part {one.part_shape}"
    if isinstance(value, _Plain):
        return None
    return f"state {key!r} of {one.name!r} is a {type(value).__name__}"


def _whole(one: _Param, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.dim() or one.home is None:
        return value.detach().clone()
    label = f"{key} of {one.name}"
    return one.home.storage.assembled(one.home.i, value, label=label)


# Loading -------------------------------------------------------------------------------------


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    storages: Sequence[Storage],
    given: Mapping[str, Any],
) -> None:
    """Take this rank's parts of a whole state by name. Nothing is communicated.

    Raises:
        ArgumentError: names, groups or shapes do not fit; nothing was loaded.
    """
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise ArgumentError("an optimizer state is a dict with 'state' and 'param_groups'")
    groups = _params(optimizer, module, storages)
    flat = [one for params in groups for one in params]
    chosen = _match_groups([[one.name for one in params] for params in groups], given)
    state: Mapping[str, Mapping[str, Any]] = given["state"]
    per_element = _per_element({one.name: one.shape for one in flat}, state)
    wrong = [
        f"{key!r} of {one.name!r} has shape {tuple(value.shape)} instead of {one.shape}"
        for one in flat
        for key, value in state.get(one.name, {}).items()
        if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != one.shape
    ]
    if wrong:
        raise ArgumentError(f"the optimizer state does not fit: {'; '.join(wrong)}")
    holders = [_by_holder(params) for params in groups]
    parts = [_joined(own, state, per_element) for group in holders for own in group]
    numbers = iter(range(len(parts)))
    # In the form of torch, which converts the tensors and runs the optimizer's own hooks.
    optimizer.load_state_dict(
        {
            "state": {i: part for i, part in enumerate(parts) if part is not None},
            "param_groups": [
                {**_options(theirs), "params": [next(numbers) for _ in group]}
                for theirs, group in zip(chosen, holders, strict=True)
            ],
        }
    )


def _by_holder(params: Sequence[_Param]) -> list[list[_Param]]:
    """Parameters of a model by the one of the optimizer that stands for them."""
    found: dict[int, list[_Param]] = {}
    for one in params:
        found.setdefault(id(one.param), []).append(one)
    return list(found.values())


def _joined(
    own: Sequence[_Param],
    state: Mapping[str, Mapping[str, Any]],
    per_element: Callable[[Shape, str], bool],
) -> dict[str, Any] | None:
    """This rank's part of the state of what an optimizer has; None if it has none.

    Args:
        own: the parameters that it stands for.

    Raises:
        ArgumentError: a flat parameter would need two different values of a state.
    """
    first = own[0]
    keys = state.get(first.name, {}).keys()
    for one in own:
        if state.get(one.name, {}).keys() != keys or (one.name in state) != (first.name in state):
            raise _not_one(first, one, "different states")
    if first.name not in state:
        return None
    joined = {}
    for key in keys:
        values = [state[one.name][key] for one in own]
        are_cut = [
            _is_cut(one, value, per_element(one.shape, key))
            for one, value in zip(own, values, strict=True)
        ]
        parts = [
            _part(one, value) if is_cut else _copied(value)
            for one, value, is_cut in zip(own, values, are_cut, strict=True)
        ]
        joined[key] = parts[0]
        if first.is_flat and all(are_cut):
            joined[key] = torch.cat([part.reshape(-1) for part in parts])
        elif first.is_flat:
            for one, value in zip(own, values, strict=True):
                if (isinstance(value, Tensor) and value.dim()) or value != values[0]:
                    raise _not_one(first, one, f"{key} {values[0]} and {value}")
    return joined


def _not_one(first: _Param, other: _Param, what: str) -> ArgumentError:
    return ArgumentError(
        f"the optimizer state does not fit: {first.name!r} and {other.name!r} have {what}, and "
        "with use_orig_params=False they are one flat parameter, which has one state: wrap with "
        "use_orig_params=True"
    )


def _match_groups(
    names: Sequence[Sequence[str]], given: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """For each group of an optimizer the given one with the same names.

    Raises:
        ArgumentError: names are missing or unknown, or otherwise grouped.
    """
    mine = {name for own in names for name in own}
    theirs = {name for one in given["param_groups"] for name in one["params"]}
    wrong = [f"{name}: missing" for name in sorted(mine - theirs)]
    wrong += [f"{name}: unexpected" for name in sorted((theirs | given["state"].keys()) - mine)]
    if wrong:
        raise ArgumentError(f"the optimizer state does not fit: {'; '.join(wrong)}")
    left = list(given["param_groups"])
    chosen: list[Mapping[str, Any]] = []
    for i, own in enumerate(names):
        same = next((one for one in left if set(one["params"]) == set(own)), None)
        if same is None:
            raise ArgumentError(
                f"the optimizer state does not fit: no group of it has the {len(own)} parameters "
                f"of group {i} of the optimizer, {', '.join(own):.80}"
            )
        left = [one for one in left if one is not same]
        chosen.append(same)
    return chosen


def _per_element(
    shapes: Mapping[str, Shape], state: Mapping[str, Mapping[str, Any]]
) -> Callable[[Shape, str], bool]:
    """Tell states with one number for each element from states that are one number.

    They look alike for a parameter without dims; there the other parameters tell.
    """
    numbers = {"step"}
    many: set[str] = set()
    for name, values in state.items():
        if shapes[name]:
            for key, value in values.items():
                if isinstance(value, Tensor):
                    (many if value.dim() else numbers).add(key)
    return lambda shape, key: bool(shape) or key in many or key not in numbers


def _is_cut(one: _Param, value: Any, per_element: bool) -> bool:
    """Whether a rank holds a part of this state."""
    return (
        isinstance(value, Tensor)
        and one.home is not None
        and per_element
        and tuple(value.shape) == one.shape
    )


def _part(one: _Param, value: Tensor) -> Tensor:
    """A copy of this rank's part."""
    assert one.home is not None
    return one.home.storage.part_of(one.home.i, value).clone()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


# Both ----------------------------------------------------------------------------------------


def _params(
    optimizer: torch.optim.Optimizer, module: nn.Module, storages: Sequence[Storage]
) -> list[list[_Param]]:
    """The parameters of each group of ``optimizer``.

    Raises:
        ArgumentError: it is no optimizer, or has a parameter that is not in the model.
    """
    checks.optimizer(optimizer)
    named = [(plain_name(name), param) for name, param in module.named_parameters()]
    names = {id(param): name for name, param in named}
    homes = homes_of(storages)
    known = {id(p): [_Param(name, p, homes.get(id(p)))] for name, p in named}
    for storage in storages:
        if storage.is_flat:
            known[id(storage.exposed[0])] = [
                _Param(names[id(param)], storage.exposed[0], homes[id(param)])
                for param in storage.params
            ]
            for param in storage.params:
                del known[id(param)]
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise ArgumentError(
                    f"group {i} of the optimizer has a parameter of shape {tuple(param.shape)} "
                    "that is not among model.parameters(): give the optimizer of this model"
                )
    return [
        [one for p in group["params"] for one in known[id(p)]] for group in optimizer.param_groups
    ]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the options of a group, without what names its parameters."""
    return {
        key: copy.deepcopy(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
