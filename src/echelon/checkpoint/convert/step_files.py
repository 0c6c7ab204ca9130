"""Steps in echelon's own form, read and written without the code of their model.

A module that has nothing but the tensors, under their names, takes the place of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint import api
from echelon.checkpoint.optimizers import number_of
from echelon.checkpoint.saved_step import SavedStep
from echelon.checkpoint.sections import PER_RANK_PREFIX
from echelon.checkpoint.step_storage import Place
from echelon.errors import ArgumentError
from echelon.values.value_types import DTYPES

_MAX_DEPTH = 100  # of nested modules, over which functions of torch are recursive


@final
@dataclass(frozen=True, kw_only=True)
class PlainState:
    """A training state by the names of the plain model.

    Attributes:
        model: tensors by name.
        optimizer: ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``.
        values: anything else.
        step: the number of the step; 0 where the form has none.
        left_out: names in the source that no other form can hold.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    left_out: tuple[str, ...] = ()


def tree_of(tensors: Mapping[str, Tensor], params: Iterable[str] = ()) -> nn.Module:
    """A module whose state dict is ``tensors``, which it shares.

    Args:
        params: names of the tensors that are parameters; the others are buffers.

    Raises:
        ArgumentError: a name is that of a tensor and of a module.

    Example:
        >>> import torch
        >>> [*tree_of({"a.b": torch.ones(1)}).state_dict()]
        ['a.b']
    """
    root, wanted = nn.Module(), set(params)
    for name, tensor in tensors.items():
        *path, local = name.split(".")
        if len(path) > _MAX_DEPTH:
            raise ArgumentError(f"{name!r:.80} lies in more than {_MAX_DEPTH} modules")
        if not all((*path, local)):
            raise ArgumentError(f"{name!r:.80} has nothing between two dots, or beside one")
        owner = root
        for step in path:
            if step not in owner._modules:
                if step in owner._buffers or step in owner._parameters:
                    raise ArgumentError(f"{name!r} lies under a name that is a tensor's")
                owner._modules[step] = nn.Module()
            below = owner._modules[step]
            assert below is not None, "made above"
            owner = below
        if local in owner._modules:
            raise ArgumentError(f"{name!r} is the name of a tensor and of others' module")
        if name in wanted:
            owner._parameters[local] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[local] = tensor
    return root


def named_optimizer(tree: nn.Module, groups: Iterable[Mapping[str, Any]]) -> Optimizer:
    """An optimizer that cannot step, with ``groups`` that have names for parameters."""
    params = dict(tree.named_parameters())
    return Optimizer(
        [{**group, "params": [params[name] for name in group["params"]]} for group in groups], {}
    )


# Names that ``save`` does not take for values.
_RESERVED = {"model", "optimizer", "directory", "step", "keep", "overwrite", "rng", "group"}
_RESERVED |= {PER_RANK_PREFIX}


@final
class SavedTensors(Mapping[str, Tensor]):
    """The tensors of one model of a step, by plain names; each is read when it is looked up."""

    def __init__(self, step: SavedStep, section: str) -> None:
        self._step, self._section = step, section
        start = f"{section}/"
        self._saved = {
            alias.removeprefix(start): saved
            for saved in step.manifest.tensors.values()
            for alias in (saved.name, *saved.ties)
            if saved.name.startswith(start)
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._step.whole(self._saved[name])

    def facts(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Names, dtypes and shapes, without reading."""
        for name, saved in self._saved.items():
            yield name, DTYPES[saved.dtype], saved.shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


def model_in(step: SavedStep, section: str | None) -> str:
    """The name under which the model was saved.

    Raises:
        ArgumentError: the step has no model, or several of which none was chosen.
    """
    models = [name for name, facts in step.sections.items() if facts["kind"] == "module"]
    if section is None and len(models) == 1:
        return models[0]
    if section not in models:
        raise ArgumentError(f"{step.folder} holds the models {models}: choose one with --section")
    return section


def read_step(step: SavedStep, section: str | None = None) -> PlainState:
    """Read one model of a step into memory, with the optimizer over it, and all values."""
    model = model_in(step, section)
    sections = step.sections.items()
    states = {name: _AnyState() for name, facts in sections if facts["kind"] == "object"}
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="cpu")
        for name, dtype, shape in SavedTensors(step, model).facts()
    }
    optimizers = {name: facts for name, facts in sections if _is_over(facts, f"{model}/")}
    named: dict[str, Any] = {}
    tree, made = tree_of(tensors), None
    for name, facts in optimizers.items():
        groups = [_group(name, group, f"{model}/") for group in facts["groups"]]
        tree = tree_of(tensors, [param for group in groups for param in group["params"]])
        made = named[name] = named_optimizer(tree, groups)
    loaded = api.load(step.folder, rng=False, **{model: tree, **named, **states})
    values = {**loaded.values, **{name: state.content for name, state in states.items()}}
    taken = {*[*named][-1:], *values}
    return PlainState(
        model=tree.state_dict(),
        optimizer=None if made is None else _state_by_name(made, tree),
        values=values,
        step=step.manifest.step,
        left_out=(
            *others_in(step, model, taken),
            *(f"{name} of ranks other than the first" for name in loaded.apart if name in values),
        ),
    )


def others_in(step: SavedStep, model: str, taken: Collection[str] = ()) -> tuple[str, ...]:
    """The names in a step, without the tensors of a model and without ``taken``."""
    return (*sorted(step.sections.keys() - {model, *taken}), *step.sections[model]["extras"])


@final
class _AnyState:
    """Takes any state, in the place of an object whose class is not known here."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


def names_that_fit(values: Mapping[str, Any]) -> list[str]:
    """The names under which values can be saved, in their order."""
    return [name for name in values if name.isidentifier() and name not in _RESERVED]


def write_step(state: PlainState, root: Place, step: int) -> Place:
    """Save a state as one step."""
    groups = [] if state.optimizer is None else list(state.optimizer["param_groups"])
    params = {param for group in groups for param in group["params"]}
    if missing := sorted(params - state.model.keys()):
        raise ArgumentError(f"the optimizer has parameters that the model lacks: {missing[:5]}")
    tree = tree_of(state.model, params)
    optimizer = None
    if state.optimizer is not None:
        optimizer = named_optimizer(tree, groups)
        by_name = dict(tree.named_parameters())
        for name, by_key in state.optimizer["state"].items():
            optimizer.state[by_name[name]] = dict(by_key)
    values = {name: state.values[name] for name in names_that_fit(state.values)}
    return api.save(root, step=step, model=tree, optimizer=optimizer, rng=False, **values)


def _is_over(section: Mapping[str, Any], start: str) -> bool:
    """Whether a section is an optimizer whose parameters' names all begin with ``start``."""
    if section["kind"] != "optimizer":
        return False
    params = [param for group in section["groups"] for param in group["params"]]
    return bool(params) and all(param.startswith(start) for param in params)


def _group(name: str, group: Mapping[str, Any], start: str) -> dict[str, Any]:
    options = {key: number_of(facts, name) for key, facts in group["options"].items()}
    return {**options, "params": [param.removeprefix(start) for param in group["params"]]}


def _state_by_name(optimizer: Optimizer, tree: torch.nn.Module) -> dict[str, Any]:
    names = {param: name for name, param in tree.named_parameters()}
    return {
        "state": {names[param]: dict(state) for param, state in optimizer.state.items()},  # type: ignore[index]
        "param_groups": [
            {**group, "params": [names[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ],
    }
