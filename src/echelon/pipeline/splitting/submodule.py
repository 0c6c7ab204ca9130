"""Stages as submodules that keep the model's own names, and the blocks that they are made of.

A stage that runs the model's own forward has a copy of the model's containers, with other children.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, final

from torch import Tensor, nn

from echelon.errors import ArgumentError
from echelon.modules.compiled import plain_name
from echelon.pipeline.splitting.fake_tensors import Recall, absent_like


@final
class Submodule(nn.Module):
    """A stage of a model: it has the state of its own modules, under the names of the model.

    Law: the ``state_dict`` of a model is the union of those of its parts.

    Args:
        body: what runs. It is no submodule: it may hold stand-ins for what other stages have.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body
        self.names: frozenset[str] = frozenset()  # of its state; ``register`` fills it
        self.training = body.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the body gives for what the part before gave."""
        return self.__dict__["body"](*args, **kwargs)

    def train(self, mode: bool = True) -> Submodule:
        """Set the mode of the body, too, which has modules that are not ours."""
        self.__dict__["body"].train(mode)
        super().train(mode)
        return self


def register(part: Submodule, own: Mapping[str, nn.Module], bare: Mapping[str, nn.Module]) -> None:
    """Give ``part`` modules under the names of the model.

    Args:
        own: whole modules by name.
        bare: modules by name of which only the tensors that they hold themselves are meant. Their
            tables are shared, so that what ``part.to(...)`` puts there is there for both.
    """
    for name, module in bare.items():
        home = _home(part, name)
        for table in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            home.__dict__[table] = module.__dict__[table]
    for name, module in own.items():
        path, _, local = name.rpartition(".")
        _home(part, path).add_module(local, module)
    part.names = frozenset(map(plain_name, part.state_dict(keep_vars=True)))


def _home(part: nn.Module, path: str) -> nn.Module:
    for local in path.split(".") if path else ():
        if local not in part._modules:
            part.add_module(local, nn.Module())
        found = part._modules[local]
        assert found is not None
        part = found
    return part


class Row(ABC):
    """What a model is made of, in order: atoms, which are not cut any further."""

    @property
    @abstractmethod
    def num_atoms(self) -> int:
        """How many there are."""

    @abstractmethod
    def part(self, start: int, stop: int) -> Submodule:
        """The atoms ``start..stop-1`` as one stage."""

    @final
    def parameters(self, index: int) -> Iterator[nn.Parameter]:
        """Those of one atom."""
        return self.part(index, index + 1).parameters()


@final
class LayerRow(Row):
    """Modules that each take what the one before gave: a tuple is its positional arguments.

    Args:
        model: which has them.
        layers: in order.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        self._names = names_of(model, layers)

    @property
    def num_atoms(self) -> int:
        """One for each layer."""
        return len(self._layers)

    def part(self, start: int, stop: int) -> Submodule:
        """Layers one after the other."""
        layers = self._layers[start:stop]
        part = Submodule(_Chain(layers))
        own = {
            name: layer
            for name, layer in zip(self._names[start:stop], layers, strict=True)
            if name is not None
        }
        register(part, own, {})
        return part


@final
class _Chain(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.training = all(layer.training for layer in layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value: Any = args
        for layer in self.layers:
            value = layer(*value if isinstance(value, tuple) else (value,), **kwargs)
        return value


def names_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[str | None]:
    """The names of ``layers`` in ``model``; None for one that the model lacks and needs no state.

    Raises:
        ArgumentError: a layer has state that is none of the model's, or is no module.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: list[str | None] = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise ArgumentError(f"layer {index} of the model is {layer!r:.60}, not a nn.Module")
        name = names.get(id(layer))
        if name is None and any(True for _ in _tensors(layer)):
            raise ArgumentError(
                f"layer {index} of the model, a {type(layer).__name__}, has parameters or buffers "
                "and is no submodule of the model, so its state would have no name: make it one"
            )
        found.append(name)
    return found


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


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
