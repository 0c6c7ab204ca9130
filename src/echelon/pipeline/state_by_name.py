"""The state of an optimizer over stages, by the names of the model's parameters.

::

    {"state": {name: {key: value}}, "param_groups": [{"lr": ..., "params": [names]}]}

It is what an optimizer over the plain model holds. A stage that is sharded puts its own together;
it is shown an optimizer that has the parameters of this stage only. Parameters that several stages
share have the name of the first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from echelon import checks
from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError
from echelon.modules.compiled import plain_name
from echelon.pipeline.stage_initialization import name_in_model


@runtime_checkable
class NamesState(Protocol):
    """A stage that knows the state of an optimizer over its parts."""

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state by the names of the stage."""

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Take this rank's parts of it."""


@final
class StateByName:
    """Saves and loads the state of one optimizer over the stages of a rank.

    Args:
        optimizer: over parameters of ``stages``; it may have those of other ranks' stages, too, if
            they have no state.
        stages: of this rank.
        first_names: for a shared parameter, by a name of it in the model, the one that counts.

    Raises:
        ArgumentError: it is no optimizer, or has the state of a parameter of no stage of this rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stages: Mapping[int, nn.Module],
        first_names: Mapping[str, str],
    ) -> None:
        checks.optimizer(optimizer)
        self._optimizer, self._stages, self._first_names = optimizer, stages, first_names
        own = {param for stage in stages.values() for param in stage.parameters()}
        for i, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param not in own and optimizer.state.get(param):
                    raise ArgumentError(
                        f"group {i} of the optimizer has the state of a parameter of shape "
                        f"{tuple(param.shape)} that is in no stage of this rank: give the "
                        "optimizer of this pipeline"
                    )

    def save(self, group: Group) -> dict[str, Any]:
        """The whole state, as copies. All ranks of ``group`` call it.

        Raises:
            StateError: the optimizers of the ranks have different groups.
        """
        state: dict[str, Any] = {}
        names: list[list[str]] = [[] for _ in self._optimizer.param_groups]
        for index, stage in self._stages.items():
            view = self._view(stage)
            if isinstance(stage, NamesState):
                found = stage.optimizer_state_dict(view)
            else:
                found = _state_of(view, stage)
            for name, value in found["state"].items():
                state[self._name(index, name)] = value
            for own, theirs in zip(names, found["param_groups"], strict=True):
                own += [self._name(index, name) for name in theirs["params"]]
        told = group.all_gather_object((_to_cpu(state), names))
        together = _together([theirs for _, theirs in told])
        return {
            "state": {name: value for theirs, _ in told for name, value in theirs.items()},
            "param_groups": [
                {**_options(own), "params": params}
                for own, params in zip(self._optimizer.param_groups, together, strict=True)
            ],
        }

    def load(self, given: Mapping[str, Any]) -> None:
        """Take this rank's share of a whole state. Nothing is communicated.

        Raises:
            ArgumentError: names or groups do not fit, and nothing was loaded; or a shape does not,
                and stages before that one were loaded.
        """
        if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
            raise ArgumentError("an optimizer state is a dict with 'state' and 'param_groups'")
        own_groups = self._optimizer.param_groups
        chosen = self._match(given)
        options = [_options(one) for one in chosen]
        found: dict[Tensor, Any] = {}
        for index, stage in self._stages.items():
            view = self._view(stage)
            if isinstance(stage, NamesState):
                stage.load_optimizer_state_dict(view, self._local(index, stage, given))
                for i, own in enumerate(view.param_groups):
                    options[i] = _options(own) if own["params"] else options[i]
            else:
                _load_into(view, stage, self._local(index, stage, given)["state"])
            found.update(view.state)
        numbers: dict[Tensor, int] = {}
        for group in own_groups:
            numbers |= {param: len(numbers) + i for i, param in enumerate(group["params"])}
        # In the form of torch, which converts the tensors and runs the optimizer's own hooks.
        self._optimizer.load_state_dict(
            {
                "state": {numbers[param]: value for param, value in found.items()},
                "param_groups": [
                    {**one, "params": [numbers[param] for param in own["params"]]}
                    for own, one in zip(own_groups, options, strict=True)
                ],
            }
        )

    def _name(self, index: int, local: str) -> str:
        name = name_in_model(self._stages[index], index, local)
        return self._first_names.get(name, name)

    def _view(self, stage: nn.Module) -> torch.optim.Optimizer:
        """The same groups with the parameters of one stage only, and their state."""
        inside = set(stage.parameters())
        groups = [
            {**_options(own), "params": [param for param in own["params"] if param in inside]}
            for own in self._optimizer.param_groups
        ]
        view = torch.optim.Optimizer(groups, {})
        for param in inside:
            if param in self._optimizer.state:
                view.state[param] = self._optimizer.state[param]
        return view

    def _groups_by_name(self) -> list[set[str]]:
        """The names in each group of the parameters that this rank has."""
        found: list[set[str]] = []
        for group in self._optimizer.param_groups:
            inside = set(group["params"])
            found.append(
                {
                    self._name(index, name)
                    for index, stage in self._stages.items()
                    for name, param in _plain(stage)
                    if param in inside
                }
            )
        return found

    def _match(self, given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """For each group of the optimizer the given one that has its parameters.

        One of which this rank has nothing, or flat parameters, gets the one at its place.
        """
        theirs = list(given["param_groups"])
        known = {name for one in theirs for name in one["params"]}
        mine = self._groups_by_name()
        missing = sorted(set().union(*mine) - known)
        if missing:
            wrong = "; ".join(f"{name}: missing" for name in missing)
            raise ArgumentError(f"the optimizer state does not fit: {wrong}")
        chosen: list[Mapping[str, Any]] = []
        for i, names in enumerate(mine):
            same = [one for one in theirs if names <= set(one["params"])]
            if not same or (not names and len(theirs) != len(mine)):
                raise ArgumentError(
                    f"the optimizer state does not fit: no group of it has the {len(names)} "
                    f"parameters of group {i} of the optimizer, {', '.join(sorted(names)):.80}"
                )
            chosen.append(same[0] if names else theirs[i])
        return chosen

    def _local(self, index: int, stage: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one stage, by its own names."""
        names = {self._name(index, local): local for local, _ in _plain(stage)}
        return {
            "state": {names[name]: one for name, one in given["state"].items() if name in names},
            "param_groups": [
                {
                    **_options(one),
                    "params": [names[name] for name in one["params"] if name in names],
                }
                for one in given["param_groups"]
            ],
        }


def _together(everyone: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """The names in each group, of all ranks."""
    counts = [len(groups) for groups in everyone]
    if len(set(counts)) > 1:
        raise StateError(
            f"the optimizers of the ranks have different numbers of groups, {counts} by rank: make "
            "the same groups on all ranks"
        )
    found: list[list[str]] = [[] for _ in range(counts[0])]
    group_of: dict[str, int] = {}
    for groups in everyone:
        for i, names in enumerate(groups):
            for name in names:
                if name not in group_of:
                    group_of[name] = i
                    found[i].append(name)
                elif group_of[name] != i:
                    raise StateError(
                        f"the shared parameter {name!r} is in different groups of the optimizers "
                        "of the ranks, so its copies would drift apart: put it into the same group "
                        "on all ranks"
                    )
    return found


def _plain(stage: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the model, also where a wrapper shows others to optimizers."""
    for name, param in nn.Module.named_parameters(stage):
        yield plain_name(name), param


def _state_of(view: torch.optim.Optimizer, stage: nn.Module) -> dict[str, Any]:
    names: dict[Tensor, str] = {p: plain_name(name) for name, p in stage.named_parameters()}
    return {
        "state": {names[param]: copy.deepcopy(one) for param, one in view.state.items()},
        "param_groups": [
            {"params": [names[param] for param in group["params"]]} for group in view.param_groups
        ],
    }


def _load_into(
    view: torch.optim.Optimizer, stage: nn.Module, state: Mapping[str, Mapping[str, Any]]
) -> None:
    params = {plain_name(name): p for name, p in stage.named_parameters() if _has(view, p)}
    wrong = [
        f"{key!r} of {name!r} has shape {tuple(value.shape)} instead of {tuple(params[name].shape)}"
        for name, values in state.items()
        for key, value in (values.items() if name in params else ())
        if isinstance(value, Tensor) and value.dim() and value.shape != params[name].shape
    ]
    if wrong:
        raise ArgumentError(f"the optimizer state does not fit: {'; '.join(wrong)}")
    view.state.clear()
    for name, param in params.items():
        if name in state:
            view.state[param] = copy.deepcopy(dict(state[name]))


def _has(view: torch.optim.Optimizer, param: nn.Parameter) -> bool:
    return any(param is one for group in view.param_groups for one in group["params"])


def _to_cpu(value: Any) -> Any:
    """Copies that may go to another process."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _to_cpu(one) for key, one in value.items()}
    return value


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the options of a group, without what names its parameters."""
    return {
        key: copy.deepcopy(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
