"""A module that is nothing but tensors under given names, and an optimizer over it.

With these, a checkpoint is read and written without the code of its model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import ArgumentError

_MAX_DEPTH = 100  # modules inside of modules; torch's own functions call themselves for each


@final
@dataclass(frozen=True, kw_only=True)
class PlainState:
    """A training state by the names of the plain model.

    Attributes:
        model: tensors by name.
        optimizer: ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``.
        values: anything else.
        step: its number; 0 where the form has none.
        left_out: names of what there was and no other form takes.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    left_out: tuple[str, ...] = ()


def tree_of(tensors: Mapping[str, Tensor], params: Iterable[str] = ()) -> nn.Module:
    """A module whose state dict is ``tensors``; it has their memory.

    Args:
        params: which of them are parameters; the others are buffers.

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
    """An optimizer that cannot step, with ``groups`` whose parameters are given by name."""
    params = dict(tree.named_parameters())
    return Optimizer(
        [{**group, "params": [params[name] for name in group["params"]]} for group in groups], {}
    )
