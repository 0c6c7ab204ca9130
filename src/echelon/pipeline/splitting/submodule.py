"""Blocks of a model, and ``Submodule``: a stage of consecutive blocks with the model's names.

::

    model     ──>  Blocks            the units of the model in order, which are not cut further
    blocks    ──>  partition         which of them go to which stage
    a range   ──>  Submodule         runs them, and has their state under the names of the model

There are two kinds of ``Blocks``: layers that run one after the other (below), and the blocks of a
``ModuleList`` (``module_list``). For the latter each stage runs the model's own ``forward``, on a
copy of the model's containers with stand-ins for the modules that other stages have.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MethodType
from typing import Any, NamedTuple, final

from torch import nn

from echelon.errors import ArgumentError
from echelon.modules.compiled import plain_name
from echelon.pipeline.splitting.fake_tensors import FakeTensorCache, fake_tensor


@final
class Submodule(nn.Module):
    """A stage of a model, whose state has the names of the model.

    Law: the ``state_dict`` of a model is the union of those of its submodules.

    The ``body`` runs. It is no attribute, because modules of the model may have any name, and not a
    child, because it may hold stand-ins for modules of other stages.
    The ``modules`` are those of the stage, by name in the model. Of ``containers`` the stage has
    only their own tensors; their tables are shared, so that ``submodule.to(...)`` changes both.
    """

    def __init__(
        self,
        body: nn.Module,
        modules: Mapping[str, nn.Module],
        containers: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["_stage_body"] = body
        self.training = body.training
        for name, container in (containers or {}).items():
            copied = _descendant(self, name)
            for table in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                copied.__dict__[table] = container.__dict__[table]
        for name, module in modules.items():
            path, _, local = name.rpartition(".")
            _descendant(self, path).add_module(local, module)
        names = frozenset(map(plain_name, self.state_dict(keep_vars=True)))
        self.__dict__["_stage_names"] = names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body on the output of the previous stage."""
        return self.__dict__["_stage_body"](*args, **kwargs)

    def train(self, mode: bool = True) -> Submodule:
        """Set the mode of the body, too, whose modules are not all children of this one."""
        self.__dict__["_stage_body"].train(mode)
        super().train(mode)
        return self


def state_names(submodule: Submodule) -> frozenset[str]:
    """The names of the state of a stage in the model."""
    names: frozenset[str] = submodule.__dict__["_stage_names"]
    return names


def _descendant(module: nn.Module, path: str) -> nn.Module:
    """The module of that name; it and those on the way to it are made if they are missing."""
    for local in path.split(".") if path else ():
        if local not in module._modules:
            module.add_module(local, nn.Module())
        child = module._modules[local]
        assert child is not None
        module = child
    return module


class Blocks(ABC):
    """The blocks of a model in order, which are not cut further.

    Attributes:
        modules: the module of each block; several blocks may be one module.
    """

    modules: list[nn.Module]

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """How many blocks the model has."""

    @abstractmethod
    def submodule(self, start: int, stop: int) -> Submodule:
        """The blocks ``start..stop-1`` as one stage."""

    @final
    def parameters(self, index: int) -> Iterator[nn.Parameter]:
        """The parameters of one block."""
        return self.submodule(index, index + 1).parameters()


@final
class SequentialBlocks(Blocks):
    """Layers that each take the output of the previous one.

    Args:
        model: that has the layers.
        layers: in order.
        spread_tuples: whether a tuple is the positional arguments of the next layer; else it is one
            argument, as in an ``nn.Sequential``.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], *, spread_tuples: bool
    ) -> None:
        self.modules = list(layers)
        self._spread_tuples = spread_tuples
        self._names = _names_of(model, layers)

    @property
    def num_blocks(self) -> int:
        """The number of layers."""
        return len(self.modules)

    def submodule(self, start: int, stop: int) -> Submodule:
        """A stage that runs its layers one after the other."""
        layers = self.modules[start:stop]
        named = zip(self._names[start:stop], layers, strict=True)
        modules = {name: layer for name, layer in named if name is not None}
        is_last = stop == self.num_blocks
        body = _Sequence(layers, spread_tuples=self._spread_tuples, is_last=is_last)
        return Submodule(body, modules)


@final
class _Sequence(nn.Module):
    def __init__(self, layers: Sequence[nn.Module], *, spread_tuples: bool, is_last: bool) -> None:
        super().__init__()
        self.spread_tuples, self.is_last = spread_tuples, is_last
        self.layers = nn.ModuleList(layers)
        self.training = all(layer.training for layer in layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = args
        for layer in self.layers:
            output = layer(*args, **kwargs)
            spread = self.spread_tuples and isinstance(output, tuple)
            args = output if spread else (output,)
        # A tuple is the arguments of the next stage: one that is a single argument is inside one.
        return args if isinstance(output, tuple) and not self.is_last else output


def _names_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[str | None]:
    """The names of ``layers`` in ``model``; None for a layer without state that is not in it.

    A module that is several layers has as many names, in an ``nn.Sequential``.
    """
    names: dict[nn.Module, deque[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, deque()).append(name)
    names_of_layers: list[str | None] = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise ArgumentError(f"layer {index} of the model is {layer!r:.60}, not a nn.Module")
        left = names.get(layer)
        name = None if left is None else left.popleft() if len(left) > 1 else left[0]
        if name is None and [*layer.parameters(), *layer.buffers()]:
            raise ArgumentError(
                f"layer {index} of the model, a {type(layer).__name__}, has parameters or buffers "
                "and is no submodule of the model, so its state would have no name: make it one"
            )
        names_of_layers.append(name)
    return names_of_layers


# --- a model with some of its modules ----------------------------------------------------------


class PartialModel(NamedTuple):
    """A copy of a model's containers that has some of its modules and stand-ins for the others.

    Attributes:
        model: the copy, whose forward is that of the model.
        modules: its real modules outside of the list of blocks, by name.
        containers: the copied containers, by name, with all of their buffers and with the
            parameters of the stage.
    """

    model: nn.Module
    modules: dict[str, nn.Module]
    containers: dict[str, nn.Module]


def partial_model(
    model: nn.Module,
    list_name: str,
    blocks: Sequence[nn.Module],
    names: AbstractSet[str],
    make_stand_in: Callable[[nn.Module, str], nn.Module],
    cache: FakeTensorCache,
) -> PartialModel:
    """Copy the containers of ``model`` on the way to its list of blocks, which becomes ``blocks``.

    The copy shares the modules and parameters outside of the list that ``names`` has; it has
    stand-ins for other modules and fake tensors for other parameters.
    """
    modules: dict[str, nn.Module] = {}
    stand_ins: dict[int, nn.Module] = {}

    def child_in_copy(name: str, child: nn.Module) -> nn.Module:
        if name == list_name:
            block_list = copy.copy(child)
            block_list._modules = {str(i): block for i, block in enumerate(blocks)}
            return block_list
        if name in names:
            modules[name] = child
            return child
        if id(child) not in stand_ins:
            stand_ins[id(child)] = make_stand_in(child, name)
        return stand_ins[id(child)]

    containers: dict[str, nn.Module] = {}
    copied = _copy_containers(model, "", list_name, child_in_copy, containers)
    for path, container in containers.items():
        for local, param in list(container._parameters.items()):
            name = f"{path}.{local}".lstrip(".")
            if param is not None and name not in names:
                del container._parameters[local]
                fake = fake_tensor(param.shape, param.dtype, param.device, name, cache)
                container.__dict__[local] = fake
    return PartialModel(copied, modules, containers)


def _copy_containers(
    module: nn.Module,
    name: str,
    path: str,
    child_in_copy: Callable[[str, nn.Module], nn.Module],
    containers: dict[str, nn.Module],
) -> nn.Module:
    """Copy ``module`` and those on the way to ``path``; ``child_in_copy`` makes other children."""
    copied: nn.Module = module.__class__.__new__(module.__class__)
    copied.__dict__ = dict(module.__dict__)
    for table in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[table] = dict(module.__dict__[table])
    for attribute, value in module.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:  # it was set on the object
            copied.__dict__[attribute] = MethodType(value.__func__, copied)
    _check_runs_its_part(copied, name)
    containers[name] = copied
    for local, child in module._modules.items():
        child_name = f"{name}.{local}".lstrip(".")
        if child is None:
            continue
        copied._modules[local] = (
            _copy_containers(child, child_name, path, child_in_copy, containers)
            if path.startswith(f"{child_name}.")
            else child_in_copy(child_name, child)
        )
    return copied


def _check_runs_its_part(copied: nn.Module, name: str) -> None:
    """Refuse a copy whose call would run the whole model, because it does not know the copy."""
    whole = f"{type(copied).__name__}{f' {name!r}' if name else ''}"
    if copied.__dict__.get("_compiled_call_impl") is not None:
        raise ArgumentError(
            f"{whole} is compiled as a whole and cannot be split into stages: compile its blocks"
        )
    forward = copied.__dict__.get("forward")
    if forward is not None and getattr(forward, "__self__", None) is not copied:
        raise ArgumentError(
            f"the forward of {whole} was replaced on this object by {forward!r:.80}, which runs "
            "the whole model: replace it in the class, or by types.MethodType(function, module)"
        )
