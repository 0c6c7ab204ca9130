"""All that one rank holds of a model: ranges of its tensors, under the names of the plain model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.modules.compiled import plain_name
from echelon.state.tensor_shard import Rename, Replication, TensorShard, whole, whole_parameter

_EXTRA = "_extra_state"  # where nn.Module keeps what get_extra_state() returns
ShardsByParam = Mapping[nn.Parameter, tuple[TensorShard, ...]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class ExtraState:
    """What a module adds to its state by ``get_extra_state``, and the module that takes it back."""

    name: str
    module: nn.Module


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedState:
    """All that one rank holds of a model.

    Attributes:
        tensors: parameters and persistent buffers.
        params: for each parameter object that an optimizer may have, the ranges that its memory is,
            end to end.
        extras: further state of modules.
        axes: the groups over which the model is shared, one for each axis of the mesh; together
            their sizes give the number of ranks that share it.
        before_write: called before ``values`` are written.
    """

    tensors: tuple[TensorShard, ...]
    params: Mapping[nn.Parameter, tuple[TensorShard, ...]]
    extras: tuple[ExtraState, ...] = ()
    axes: tuple[Group, ...] = ()
    before_write: Callable[[], None] = lambda: None

    def renamed(self, rename: Rename) -> ShardedState:
        """The same under other names."""
        extras = tuple(ExtraState(rename(one.name), one.module) for one in self.extras)
        return replace(self.changed(lambda one: one.renamed(rename)), extras=extras)

    def changed(self, change: Callable[[TensorShard], TensorShard]) -> ShardedState:
        """The same with something else said of each range."""
        found = {id(one): change(one) for one in self.tensors}
        return replace(
            self,
            tensors=tuple(found.values()),
            params={
                param: tuple(found.get(id(one)) or change(one) for one in own)
                for param, own in self.params.items()
            },
        )


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class ParameterShards:
    """The parameters of one module as an optimizer has them, and how ranks put tensors together.

    Attributes:
        by_param: for each parameter object that an optimizer may have, the ranges that it is, end
            to end; several ranges for a flat parameter.
        group: the ranks whose ranges make up the parameters; None: each rank has them whole.
        assemble: makes the whole tensor of values like those of a range, with a label for the
            collective; all ranks of ``group`` call it.
        before_write: called before ``values`` of ranges are written.
    """

    by_param: ShardsByParam
    group: Group | None = None
    assemble: Callable[[TensorShard, Tensor, str], Tensor] | None = None
    before_write: Callable[[], None] = lambda: None

    def renamed(self, rename: Rename) -> ParameterShards:
        """The same under other names."""
        by_param = {
            param: tuple(shard.renamed(rename) for shard in shards)
            for param, shards in self.by_param.items()
        }
        return replace(self, by_param=by_param)


class HasShards(ABC):
    """A module that knows what it holds of the plain model; nothing else need look inside."""

    @abstractmethod
    def holdings(self) -> ShardedState:
        """What this rank holds, under the plain names. Nothing is communicated.

        Law: what is written into ``values`` after ``before_write()`` is loaded.

        Raises:
            StateError: in the middle of a step.
            ArgumentError: a tensor cannot be saved or loaded.
        """

    @abstractmethod
    def parameter_shards(self) -> tuple[ParameterShards, ...]:
        """What this rank holds of the parameters alone, for the state of an optimizer over them.

        Nothing is communicated. Names are the plain ones.
        """

    @abstractmethod
    def shared_over(self) -> tuple[Group, ...]:
        """The groups over which it is shared, one for each axis of the mesh."""


# Of any module -------------------------------------------------------------------------------


def sharded_state_of(
    modules: Sequence[tuple[Rename, nn.Module]], *, copy: int = 0, num_copies: int = 1
) -> ShardedState:
    """What this rank holds of modules: the Holders in them say so, and the rest is here whole.

    What is in several places is held once, under all of its names.

    Args:
        modules: each with what makes names in the model of its own.
        copy: which of the ranks that have the same plain modules this one is.
        num_copies: how many have them; nobody keeps them alike.

    Raises:
        StateError: in the middle of a step of a Holder.
        ArgumentError: a tensor cannot be saved or loaded.
    """
    said: dict[int, ShardedState] = {}
    parts: list[tuple[bool, ShardedState]] = []  # whether that is plain, and what it is
    for rename, module in modules:
        for path, one in _places(module):
            in_model = partial(_joined, rename, path)
            if isinstance(one, HasShards):
                if id(one) not in said:
                    said[id(one)] = one.holdings()
                parts.append((False, said[id(one)].renamed(in_model)))
            else:
                parts.append((True, _own_holdings(one, in_model, copy, num_copies)))
    return _merged(parts)


def axes_in(module: nn.Module) -> tuple[Group, ...]:
    """The groups over which the Holders in ``module`` are shared, each once."""
    found: dict[tuple[int, ...], Group] = {}
    for _, one in _places(module):
        for axis in one.shared_over() if isinstance(one, HasShards) else ():
            found.setdefault(axis.ranks, axis)
    return tuple(found.values())


def _places(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module by its path, also where it comes again; nothing that is inside of a Holder."""
    yield path, module
    for local, child in () if isinstance(module, HasShards) else module._modules.items():
        if child is not None:
            yield from _places(child, plain_name(f"{path}.{local}".lstrip(".")))


def _joined(rename: Rename, path: str, local: str) -> str:
    return rename(f"{path}.{local}".lstrip("."))


def _own_holdings(module: nn.Module, rename: Rename, copy: int, num_copies: int) -> ShardedState:
    """What a plain module has itself, without the modules below."""
    found = [
        (tensor, whole((rename(local),), tensor, copy, num_copies, Replication.PER_RANK))
        for local, tensor in _own_state(module)
    ]
    return ShardedState(
        tensors=tuple(one for _, one in found),
        params={tensor: (one,) for tensor, one in found if isinstance(tensor, nn.Parameter)},
        extras=(ExtraState(rename(_EXTRA), module),) if _has_extra(module) else (),
    )


def _merged(parts: Sequence[tuple[bool, ShardedState]]) -> ShardedState:
    """All as one, in order; where a plain part and another have a tensor, the other one counts."""
    known: dict[int, TensorShard] = {}
    for _, part in sorted(parts, key=lambda one: one[0]):
        for held in part.tensors:
            known.setdefault(held.identity, held)
    names: dict[int, dict[str, None]] = {}
    params: dict[nn.Parameter, tuple[TensorShard, ...]] = {}
    extras: dict[nn.Module, ExtraState] = {}
    axes: dict[tuple[int, ...], Group] = {}
    for _, part in parts:
        for held in part.tensors:
            names.setdefault(held.identity, {}).update(dict.fromkeys(held.names))
        params |= part.params
        for extra in part.extras:
            extras.setdefault(extra.module, extra)
        for axis in part.axes:
            axes.setdefault(axis.ranks, axis)
    merged = {key: replace(known[key], names=tuple(own)) for key, own in names.items()}

    def before_write() -> None:
        for _, part in parts:
            part.before_write()

    return ShardedState(
        tensors=tuple(merged.values()),
        params={
            param: tuple(merged.get(one.identity, one) for one in own)
            for param, own in params.items()
        },
        extras=tuple(extras.values()),
        axes=tuple(axes.values()),
        before_write=before_write,
    )


def parameter_shards_in(module: nn.Module, rename: Rename = str) -> Iterator[ParameterShards]:
    """What this rank holds of the parameters of any module, under the names that ``rename`` makes.

    The modules with shards in it say so; every other parameter is whole.
    """
    plain: dict[nn.Parameter, tuple[TensorShard, ...]] = {}
    for path, inner in _places(module):
        in_model = partial(_joined, rename, path)
        if isinstance(inner, HasShards):
            for shards in inner.parameter_shards():
                yield shards.renamed(in_model)
        else:
            for local, param in inner._parameters.items():
                if param is not None:
                    plain.setdefault(param, (whole_parameter((in_model(local),), param),))
    yield ParameterShards(by_param=plain)


# Names ---------------------------------------------------------------------------------------


def named_state(module: nn.Module) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Parameters and persistent buffers of a plain module, each once, with all of its names.

    The order is that of ``state_dict``, by the first name. What ``torch.compile`` puts into names
    is left out.

    Example:
        >>> one = nn.Linear(1, 1, bias=False)
        >>> [names for names, _ in named_state(nn.Sequential(one, one))]
        [('0.weight', '1.weight')]
    """
    found: dict[int, tuple[list[str], Tensor]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for local, tensor in _own_state(owner):
            name = plain_name(f"{path}.{local}".lstrip("."))
            found.setdefault(id(tensor), ([], tensor))[0].append(name)
    for names, tensor in found.values():
        yield tuple(names), tensor


def _own_state(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a module itself has in its ``state_dict``."""
    for local, param in owner._parameters.items():
        if param is not None:
            yield local, param
    for local, buffer in owner._buffers.items():
        if buffer is not None and local not in owner._non_persistent_buffers_set:
            yield local, buffer


def named_extras(module: nn.Module) -> Iterator[ExtraState]:
    """The modules that have further state, each once."""
    for path, owner in module.named_modules():
        if _has_extra(owner):
            yield ExtraState(plain_name(f"{path}.{_EXTRA}".lstrip(".")), owner)


def _has_extra(owner: nn.Module) -> bool:
    return type(owner).get_extra_state is not nn.Module.get_extra_state
