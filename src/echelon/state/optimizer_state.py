"""The state of an optimizer by the names of the plain model, from what each rank holds of it.

::

    {"state": {name: {key: whole tensor or number}},
     "param_groups": [{"lr": ..., "params": [names]}],
     name: value of what else its own state_dict() has, such as a counter}

It is the state of an optimizer over the plain model, and does not depend on the number of ranks or
the layout of shards. There are three kinds of states:

- *per element*: a tensor of the shape of its parameter, such as ``exp_avg``. It is sharded as the
  parameter is.
- a number of its parameter: a tensor without dims, such as ``step``, or a Python number.
- anything else, such as the row means of Adafactor. This rank must have all of its parameter.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon import checks
from echelon.comm.agreement import first_difference
from echelon.comm.compiler_bypass import bypass_compiler
from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError, UnsupportedError
from echelon.errors.message_text import misfit_text
from echelon.modules.optimizer_memory import number_keys
from echelon.modules.sharded_tensor import is_part, local_shard
from echelon.state.sharded_state import HasShards, ParameterShards, ShardsByParam
from echelon.state.tensor_shard import TensorShard

StateByName = Mapping[str, Mapping[str, Any]]


@final
class StateEntry(NamedTuple):
    """One state of one range of a parameter.

    Attributes:
        shard: the range.
        key: of the state, such as ``"exp_avg"``.
        value: a tensor or a number; if ``per_element``, the elements of this range.
        per_element: whether the value has one number for each element of the range.
    """

    shard: TensorShard
    key: str
    value: Any
    per_element: bool


def entries_of(optimizer: Optimizer, shards: ShardsByParam) -> Iterator[StateEntry]:
    """The states of all ranges, in the order of the groups."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [
        (param, local_shard(param).shape, optimizer.state[param])
        for param in params
        if param in optimizer.state
    ]
    numbers = number_keys(
        optimizer,
        ((tuple(shape), key, value) for _, shape, state in states for key, value in state.items()),
    )
    for param, shape, state in states:
        ranges = shards.get(param, ())
        # A state is shaped like its parameter, or like the one range that this rank has of it.
        shapes = {shape, *(shard.values.shape for shard in ranges if len(ranges) == 1)}
        for key, value in state.items() if ranges else ():
            value = local_shard(value) if is_part(value) else value
            per_element = (
                isinstance(value, Tensor)
                and value.shape in shapes
                and (bool(shape) or key not in numbers)
            )
            yield from _split(param, ranges, key, value, per_element=per_element)


def _split(
    param: nn.Parameter, ranges: Sequence[TensorShard], key: str, value: Any, *, per_element: bool
) -> Iterator[StateEntry]:
    """The entry of a state for each range of its parameter."""
    if per_element and _is_flat(param, ranges):
        flat = value.view(-1).split([shard.numel for shard in ranges])
        for shard, part in zip(ranges, flat, strict=True):
            yield StateEntry(shard, key, part.view(shard.values.shape), True)
    else:
        for shard in ranges:
            yield StateEntry(shard, key, value, per_element)


def _is_flat(param: nn.Parameter, ranges: Sequence[TensorShard]) -> bool:
    """Whether the optimizer has a flat parameter in the place of those of the model."""
    return len(ranges) != 1 or ranges[0].identity != id(param)


# Saving --------------------------------------------------------------------------------------


def extra_state(optimizer: Optimizer) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` has beyond the states of parameters and the groups.

    That is a history, a counter or the like, which the optimizer needs to go on as it would have.

    Raises:
        UnsupportedError: it keeps states elsewhere than in ``optimizer.state``, or tensors that
            belong to no parameter.
    """
    kind = type(optimizer)
    hooks = {"_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"}
    if kind.state_dict is Optimizer.state_dict and not any(
        vars(optimizer).get(name) for name in hooks
    ):
        return {}
    what = f"{kind.__name__}.state_dict()"
    instead = (
        "so it would not go on as it was: keep what belongs to a parameter in "
        "optimizer.state[param] and other values as numbers, or save it in a file of its own"
    )
    try:
        state_dict = optimizer.state_dict()
    except Exception as error:
        raise UnsupportedError(
            f"{what} raises {type(error).__name__}: {error!s:.200}, {instead}"
        ) from error
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        keys = ", ".join(map(str, state_dict)) if isinstance(state_dict, Mapping) else "no dict"
        raise UnsupportedError(
            f"{what} does not have 'state' and 'param_groups' but {keys:.200}, {instead}"
        )
    states = [state for state in optimizer.state.values() if state]
    saved = [state for state in state_dict["state"].values() if state]
    if len(states) != len(saved):
        raise UnsupportedError(
            f"{what} has states of {len(saved)} parameters, and optimizer.state those of "
            f"{len(states)}, {instead}"
        )
    extra = {
        key: value for key, value in state_dict.items() if key not in ("state", "param_groups")
    }
    for key, value in extra.items():
        if any(isinstance(item, Tensor) for item in _items_in(value)):
            raise UnsupportedError(
                f"{what} has tensors under {key!r}, which belong to no parameter, {instead}"
            )
    return copy.deepcopy(extra)


def _items_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _items_in(item)
    else:
        yield value


def gather_optimizer_state(optimizer: Optimizer, shards: ParameterShards) -> dict[str, Any]:
    """The full state of an optimizer over the parameters in ``shards``, by name, as copies.

    All ranks of its group call it.

    Raises:
        ArgumentError: a parameter of the optimizer is not in ``shards``.
        UnsupportedError, StateError: as ``gather_states``.
    """
    check_params(optimizer, shards.by_param, exact=True)
    states = gather_states(optimizer, shards)
    return named_state_dict(optimizer, states, names_by_group(optimizer, shards.by_param))


@torch.inference_mode(mode=False)
def gather_states(optimizer: Optimizer, shards: ParameterShards) -> dict[str, dict[str, Any]]:
    """The full states of the parameters in ``shards``, by name, as copies.

    All ranks of its group call it; one tensor is gathered at a time.

    Raises:
        UnsupportedError: a state on some rank is not one number for each element of its parameter.
        StateError: the optimizers of the ranks hold different states.
    """
    entries = list(entries_of(optimizer, shards.by_param))
    if shards.group is not None:
        shards.group.barrier(label="optimizer_state_dict(), which all ranks call")
        _check_alike(entries, shards.group)
    state: dict[str, dict[str, Any]] = {}
    for shard, key, value, per_element in entries:
        if per_element and shards.assemble is not None:
            full = shards.assemble(shard, value, f"{key} of {shard.name}")
        else:
            full = copied(value)
        state.setdefault(shard.name, {})[key] = full
    return state


def _check_alike(entries: Sequence[StateEntry], group: Group) -> None:
    """Check that all ranks will gather the same tensors, or raise on all of them."""
    problem = next((text for entry in entries if (text := _problem(entry))), None)
    kinds = {
        f"{key!r} of {shard.name!r}": str(value.dtype) if isinstance(value, Tensor) else "a number"
        for shard, key, value, _ in entries
    }
    by_rank: list[tuple[str | None, dict[str, str]]] = group.all_gather_object((problem, kinds))
    for rank, (text, _) in enumerate(by_rank):
        if text is not None:
            raise UnsupportedError(
                f"the optimizer's {text} on rank {rank}: a state must be a number, or one number "
                "for each element, to be put together from parts"
            )
    all_kinds = [kinds for _, kinds in by_rank]
    name, values = first_difference(all_kinds) or ("their order", {})
    if values or any(list(kinds) != list(all_kinds[0]) for kinds in all_kinds):
        rows = "".join(f"\n  rank {rank}: {value}" for rank, value in values.items())
        raise StateError(
            f"the optimizers of the ranks hold different states; {name}:{rows}\nStep the same "
            "optimizer on all ranks"
        )


def _problem(entry: StateEntry) -> str | None:
    """Why a state cannot be assembled from the shards of ranks; None if it can."""
    shard, key, value, per_element = entry
    if isinstance(value, Tensor):
        if per_element or not value.dim():
            return None
        shape, part = tuple(value.shape), tuple(shard.values.shape)
        return f"state {key!r} of {shard.name!r} has shape {shape}, its part {part}"
    if isinstance(value, int | float | bool | str | None):
        return None
    return f"state {key!r} of {shard.name!r} is a {type(value).__name__}"


def names_by_group(optimizer: Optimizer, shards: ShardsByParam) -> list[list[str]]:
    """The names of the parameters in each group that this rank has, in order."""
    return [
        [shard.name for param in group["params"] for shard in shards.get(param, ())]
        for group in optimizer.param_groups
    ]


def named_state_dict(
    optimizer: Optimizer, state: StateByName, names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The state dict of an optimizer over the plain model, from states and names of each group."""
    groups = [
        {**group_options(group), "params": list(members)}
        for group, members in zip(optimizer.param_groups, names, strict=True)
    ]
    return {**extra_state(optimizer), "state": dict(state), "param_groups": groups}


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the options of a group, without its parameters and their names."""
    return {
        key: copy.deepcopy(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def copied(value: Any) -> Any:
    """A copy of a state."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


# Loading -------------------------------------------------------------------------------------


@torch.inference_mode(mode=False)  # steps write into what is made here
def load_optimizer_state(
    optimizer: Optimizer,
    shards: ShardsByParam,
    state_dict: Mapping[str, Any],
    names: Sequence[Sequence[str]] | None = None,
) -> None:
    """Load this rank's ranges of a full state by name. Nothing is communicated.

    Args:
        names: of the parameters in each group on all ranks; None: this rank has all of them.

    Raises:
        ArgumentError: parameters, names, groups or shapes do not fit; nothing was loaded.
    """
    if names is None:
        check_params(optimizer, shards, exact=True)
        names = names_by_group(optimizer, shards)
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ArgumentError("an optimizer state is a dict with 'state' and 'param_groups'")
    state: StateByName = state_dict["state"]
    groups = _fitting_groups(names, state_dict)
    named = [
        (shard, key, value)
        for group in optimizer.param_groups
        for param in group["params"]
        for shard in shards.get(param, ())
        for key, value in state.get(shard.name, {}).items()
    ]
    wrong = [
        f"{key!r} of {shard.name!r} has shape {tuple(value.shape)} instead of {shard.shape}"
        for shard, key, value in named
        if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != shard.shape
    ]
    if wrong:
        raise ArgumentError(f"the optimizer state does not fit: {misfit_text([], [], wrong)}")
    numbers = number_keys(optimizer, ((shard.shape, key, value) for shard, key, value in named))
    states = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            joined = _joined(param, shards.get(param, ()), state, numbers)
            if joined is not None:
                states[param] = joined
    extra = {
        key: copy.deepcopy(value)
        for key, value in state_dict.items()
        if key not in ("state", "param_groups")
    }
    install_states(optimizer, states, [group_options(group) for group in groups], extra)


def _fitting_groups(
    names: Sequence[Sequence[str]], state_dict: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """For each group of an optimizer the saved one that has its parameters.

    Raises:
        ArgumentError: names are missing, unknown or otherwise grouped.
    """
    known = {name for members in names for name in members}
    groups: list[Mapping[str, Any]] = list(state_dict["param_groups"])
    saved = {name for group in groups for name in group["params"]}
    if numbers := [name for name in saved if not isinstance(name, str)]:
        raise ArgumentError(
            f"the optimizer state has parameters by number ({numbers[0]!r}), as "
            "optimizer.state_dict() gives it: load it by optimizer.load_state_dict(state), into an "
            "optimizer with the same parameters in the same order"
        )
    missing = sorted(known - saved)
    unknown = sorted((saved | state_dict["state"].keys()) - known)
    if missing or unknown:
        what = misfit_text(missing, unknown, [])
        raise ArgumentError(f"the optimizer state does not fit: {what}")
    if len(groups) != len(names):
        raise ArgumentError(
            f"the optimizer state does not fit: its number of groups is {len(groups)}, and that "
            f"of the optimizer {len(names)}"
        )
    chosen = []
    for i, match in enumerate(matches(groups_with(names, groups), len(groups))):
        if match is None:
            raise ArgumentError(
                f"the optimizer state does not fit: no group of it has the {len(names[i])} "
                f"parameters of group {i} of the optimizer, {', '.join(sorted(names[i])):.80}"
            )
        chosen.append(groups[match])
    return chosen


def groups_with(
    names: Sequence[Iterable[str]], saved: Sequence[Mapping[str, Any]]
) -> list[set[int]]:
    """For each group, given by its names, the indices of the saved ones that have any of them."""
    index_of = {name: i for i, group in enumerate(saved) for name in group["params"]}
    return [{index_of[name] for name in members if name in index_of} for members in names]


def matches(found: Sequence[Collection[int]], num_saved: int) -> list[int | None]:
    """For each group the index of the saved one that has its parameters and those of no other.

    A group without saved parameters matches the saved one at its place, if no other has that.

    Args:
        found: what ``groups_with`` finds, on all ranks together; alone they would choose otherwise.

    Example:
        >>> matches([{1}, {0}, set()], 3)
        [1, 0, 2]
        >>> matches([{0, 1}], 2), matches([{0}, {0}], 1)
        ([None], [None, None])
    """
    taken = Counter(index for indices in found for index in indices)
    return [
        match if len(indices) <= 1 and taken[match] == len(indices) and match < num_saved else None
        for i, indices in enumerate(found)
        for match in [min(indices, default=i)]
    ]


def _joined(
    param: nn.Parameter, ranges: Sequence[TensorShard], state: StateByName, numbers: set[str]
) -> dict[str, Any] | None:
    """This rank's ranges of the state of a parameter; None if it has no state.

    Raises:
        ArgumentError: a flat parameter would need two different values of a state.
    """
    if not ranges or all(shard.name not in state for shard in ranges):
        return None
    first = ranges[0]
    keys = state.get(first.name, {}).keys()
    for shard in ranges:
        if shard.name not in state or first.name not in state or state[shard.name].keys() != keys:
            raise _two_states(first, shard, "different states")
    joined = {}
    for key in keys:
        values = [state[shard.name][key] for shard in ranges]
        parts = [
            shard.range_of(value).clone() if _is_per_element(value, shard, key, numbers) else None
            for shard, value in zip(ranges, values, strict=True)
        ]
        if not _is_flat(param, ranges):
            joined[key] = copied(values[0]) if parts[0] is None else parts[0]
        elif all(part is not None for part in parts):
            joined[key] = torch.cat([part.reshape(-1) for part in parts if part is not None])
        else:
            for shard, value in zip(ranges, values, strict=True):
                if (isinstance(value, Tensor) and value.dim()) or value != values[0]:
                    raise _two_states(first, shard, f"{key} {values[0]} and {value}")
            joined[key] = copied(values[0])
    return joined


def _is_per_element(value: Any, shard: TensorShard, key: str, numbers: set[str]) -> bool:
    """Whether a value has one number for each element of the full parameter."""
    has_shape = isinstance(value, Tensor) and tuple(value.shape) == shard.shape
    return has_shape and (bool(shard.shape) or key not in numbers)


def _two_states(first: TensorShard, other: TensorShard, what: str) -> ArgumentError:
    return ArgumentError(
        f"the optimizer state does not fit: {first.name!r} and {other.name!r} have {what}, and "
        "with use_orig_params=False they are one flat parameter, which has one state: wrap with "
        "use_orig_params=True"
    )


def install_states(
    optimizer: Optimizer,
    states: Mapping[nn.Parameter, Mapping[str, Any]],
    options: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
) -> None:
    """Give an optimizer the states of its parameters, options for each group, and ``extra``."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {param: i for i, param in enumerate(params)}
    # load_state_dict converts the tensors and runs the optimizer's own hooks.
    optimizer.load_state_dict(
        {
            **extra,
            "state": {numbers[param]: dict(state) for param, state in states.items()},
            "param_groups": [
                {**of_group, "params": [numbers[param] for param in group["params"]]}
                for of_group, group in zip(options, optimizer.param_groups, strict=True)
            ],
        }
    )


# Both ----------------------------------------------------------------------------------------


@bypass_compiler
class HasOptimizerState(HasShards):
    """A module that gives and takes the state of an optimizer over all of its parameters."""

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state of ``optimizer`` by the names of parameters. All ranks call it.

        It is that of an optimizer over the plain model, gathered one tensor at a time:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``, which a
        model loads however it is split. Where each rank has all of the model, as in ``DDP``,
        nothing is communicated and one may call it alone.

        Raises:
            ArgumentError: a parameter of the optimizer is not in this model.
            UnsupportedError: a state is neither a number nor one number for each element, of which
                each rank has a part.
            StateError: the optimizers of ranks that have parts hold different states.
        """
        (shards,) = self.parameter_shards()
        return gather_optimizer_state(optimizer, shards)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a full state by name; every rank takes what it has. Nothing is communicated.

        Raises:
            ArgumentError: names, groups or shapes do not fit; nothing was loaded.
        """
        (shards,) = self.parameter_shards()
        load_optimizer_state(optimizer, shards.by_param, state)


def state_nbytes(optimizer: Optimizer) -> int:
    """The bytes of all tensors of an optimizer's state."""
    checks.instance("optimizer", optimizer, Optimizer)
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def check_params(optimizer: Optimizer, shards: ShardsByParam, *, exact: bool) -> None:
    """Refuse what is no optimizer, or has parameters that are not in ``shards``.

    Args:
        exact: whether all others are refused, and not only those with a state.

    Raises:
        ArgumentError: names the group of such a parameter.
    """
    checks.instance("optimizer", optimizer, torch.optim.Optimizer)
    where = "not among model.parameters()" if exact else "in no stage of this rank"
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in shards and (exact or optimizer.state.get(param)):
                raise ArgumentError(
                    f"group {i} of the optimizer has a parameter of shape {tuple(param.shape)} "
                    f"that is {where}: give the optimizer of this model"
                )
