"""Copies of a model's own containers, with other children: each stage runs the model's forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import nn

from echelon.pipeline.splitting.absent import absent_like
from echelon.pipeline.splitting.recall import Recall


def graft(
    model: nn.Module, path: str, replace: Callable[[str, nn.Module], nn.Module]
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A copy of the modules on the way to ``path``, with other children.

    Args:
        replace: gives what stands in the place of a child by its name; ``path`` itself included.

    Returns:
        the copied model, and the copies by name.
    """
    copies: dict[str, nn.Module] = {}

    def copied(module: nn.Module, name: str) -> nn.Module:
        twin: nn.Module = module.__class__.__new__(module.__class__)
        twin.__dict__ = dict(module.__dict__)
        for table in ("_parameters", "_buffers", "_modules"):
            twin.__dict__[table] = dict(module.__dict__[table])
        copies[name] = twin
        for local, child in module._modules.items():
            below = f"{name}.{local}".lstrip(".")
            if child is None:
                continue
            on_way = path.startswith(f"{below}.")
            twin._modules[local] = copied(child, below) if on_way else replace(below, child)
        return twin

    return copied(model, ""), copies


def carve(
    model: nn.Module,
    trunk: str,
    blocks: Sequence[nn.Module],
    names: AbstractSet[str],
    stand_in: Callable[[nn.Module, str], nn.Module],
    recall: Recall,
) -> tuple[nn.Module, dict[str, nn.Module], dict[str, nn.Module]]:
    """A model that has some of its modules and stand-ins for the others.

    Args:
        trunk: the name of the ModuleList.
        blocks: what stands in it.
        names: of the modules and parameters around the trunk that the copy has.
        stand_in: given a module that it has not, and its name.
        recall: for tensors that it has not.

    Returns:
        the copy; the modules that it has around the trunk, by name; and its containers, by name,
        of whose own tensors it has the parameters among ``names`` and all buffers.
    """
    own: dict[str, nn.Module] = {}
    memo: dict[int, nn.Module] = {}

    def replace(name: str, child: nn.Module) -> nn.Module:
        if name == trunk:
            row = copy.copy(child)
            row._modules = {str(i): block for i, block in enumerate(blocks)}
            return row
        if name in names:
            own[name] = child
            return child
        if id(child) not in memo:
            memo[id(child)] = stand_in(child, name)
        return memo[id(child)]

    shell, containers = graft(model, trunk, replace)
    for path, container in containers.items():
        for local, param in list(container._parameters.items()):
            name = f"{path}.{local}".lstrip(".")
            if param is not None and name not in names:
                del container._parameters[local]
                absent = absent_like(param.shape, param.dtype, param.device, name, recall)
                container.__dict__[local] = absent
    return shell, own, containers


def hollow(block: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A block of the same class and with the same plain attributes, without tensors."""
    found: nn.Module = block.__class__.__new__(block.__class__)
    nn.Module.__init__(found)
    plain = {key: value for key, value in vars(block).items() if key not in vars(found)}
    found.__dict__.update(plain, forward=forward)
    return found


def pass_on(*args: Any, **kwargs: Any) -> Any:
    """The forward of a block that another stage has: it gives what it was given."""
    return args[0] if args else next(iter(kwargs.values()))
