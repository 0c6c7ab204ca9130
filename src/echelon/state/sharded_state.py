"""What one rank holds of a model: ranges of its tensors, under the names of the plain model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, final

from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.modules.compiled import plain_name
from echelon.state.tensor_shard import Rename, Replication, TensorShard, whole, whole_parameter

_EXTRA = "_extra_state"  # where nn.Module keeps what get_extra_state() returns
ShardsByParam = Mapping[nn.Parameter, tuple[TensorShard, ...]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class ExtraState:
    """A module with ``get_extra_state``, and the name of that state."""

    name: str
    module: nn.Module


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedState:
    """What one rank holds of a model.

    Attributes:
        tensors: parameters and persistent buffers.
        params: for each parameter object that an optimizer may have, the ranges that make up its
            memory, end to end.
        extras: modules with extra state.
        axes: the groups over which the model is shared, one for each axis of the mesh; the product
            of their sizes is the number of ranks that share it.
        before_write: called before ``values`` are written.
    """

    tensors: tuple[TensorShard, ...]
    params: Mapping[nn.Parameter, tuple[TensorShard, ...]]
    extras: tuple[ExtraState, ...] = ()
    axes: tuple[Group, ...] = ()
    before_write: Callable[[], None] = lambda: None

    def renamed(self, rename: Rename) -> ShardedState:
        """The same under other names."""
        extras = tuple(ExtraState(rename(extra.name), extra.module) for extra in self.extras)
        return replace(self.changed(lambda shard: shard.renamed(rename)), extras=extras)

    def changed(self, change: Callable[[TensorShard], TensorShard]) -> ShardedState:
        """The same with ``change`` applied to each range."""
        changed = {id(shard): change(shard) for shard in self.tensors}
        return replace(
            self,
            tensors=tuple(changed.values()),
            params={
                param: tuple(changed.get(id(shard)) or change(shard) for shard in shards)
                for param, shards in self.params.items()
            },
        )


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class ParameterShards:
    """The parameters of one module as an optimizer has them, and how ranks assemble full tensors.

    Attributes:
        by_param: for each parameter object that an optimizer may have, the ranges that make it up,
            end to end; several ranges for a flat parameter.
        group: the ranks whose ranges make up the parameters; None: each rank has full ones.
        assemble: gathers the full tensor of which each rank gives values like those of a range,
            with a label for the collective; all ranks of ``group`` call it.
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
    """A module that describes what it holds of the plain model, so nobody needs to look inside."""

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

        Nothing is communicated. The names are those of the plain model.
        """

    @abstractmethod
    def shared_over(self) -> tuple[Group, ...]:
        """The groups over which the module is shared, one for each axis of the mesh."""


class ValuesOfModel(ABC):
    """Values beside those of a model, of the same names and ranges, such as its averages."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The model."""

    @abstractmethod
    def values_in(self, state: ShardedState) -> ShardedState:
        """``state``, which describes the model, with the values of this object in it.

        Raises:
            StateError: the model has other tensors than these values are for.
        """


# Of any module -------------------------------------------------------------------------------


@final
class ModelParts:
    """The parts of a model that describe what they hold, and the plain modules around them.

    Args:
        modules: each with the function that makes names in the model of its names.

    Raises:
        StateError: in the middle of a step of a module with shards.
        ArgumentError: a tensor cannot be saved or loaded.
    """

    def __init__(self, modules: Sequence[tuple[Rename, nn.Module]]) -> None:
        self._parts: list[tuple[Rename, nn.Module, ShardedState | None]] = []
        described: dict[nn.Module, ShardedState] = {}
        for rename, module in modules:
            for path, inner in _places(module):
                if isinstance(inner, HasShards) and inner not in described:
                    described[inner] = inner.holdings()
                in_model = partial(_joined, rename, path)
                self._parts.append((in_model, inner, described.get(inner)))

    @property
    def axes(self) -> tuple[Group, ...]:
        """The groups over which the parts with shards are shared, each once."""
        return _each_once(axis for *_, state in self._parts if state for axis in state.axes)

    def state(self, copy: int, num_copies: int) -> ShardedState:
        """All parts as one state, in which a tensor in several places is listed once.

        ``copy`` is the index of this rank among the ``num_copies`` ranks that have the same plain
        modules, each of which may have its own values. A tensor that a plain module shares with a
        part with shards is as the latter describes it.
        """
        return _merged(
            [
                _Part(_state_of_plain(module, rename, copy, num_copies), is_plain=True)
                if state is None
                else _Part(state.renamed(rename), is_plain=False)
                for rename, module, state in self._parts
            ]
        )


def axes_in(module: nn.Module) -> tuple[Group, ...]:
    """The groups over which the modules with shards in ``module`` are shared, each once."""
    inside = (inner for _, inner in _places(module) if isinstance(inner, HasShards))
    return _each_once(axis for inner in inside for axis in inner.shared_over())


def _each_once(axes: Iterable[Group]) -> tuple[Group, ...]:
    by_ranks: dict[tuple[int, ...], Group] = {}
    for axis in axes:
        by_ranks.setdefault(axis.ranks, axis)
    return tuple(by_ranks.values())


def _places(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module by each of its paths, without those inside of a module with shards."""
    yield path, module
    for local, child in () if isinstance(module, HasShards) else module._modules.items():
        if child is not None:
            yield from _places(child, plain_name(f"{path}.{local}".lstrip(".")))


def _joined(rename: Rename, path: str, local: str) -> str:
    return rename(f"{path}.{local}".lstrip("."))


def _state_of_plain(module: nn.Module, rename: Rename, copy: int, num_copies: int) -> ShardedState:
    """What a plain module has itself, without its submodules."""
    shards = [
        whole((rename(local),), tensor, copy, num_copies, Replication.PER_RANK)
        for local, tensor in _own_state(module)  # a tensor may come twice, with two names
    ]
    return ShardedState(
        tensors=tuple(shards),
        params={s.tensor: (s,) for s in shards if isinstance(s.tensor, nn.Parameter)},
        extras=(ExtraState(rename(_EXTRA), module),) if _has_extra(module) else (),
    )


class _Part(NamedTuple):
    """What a rank holds of one module."""

    state: ShardedState
    is_plain: bool


def _merged(parts: Sequence[_Part]) -> ShardedState:
    """The parts as one state, in order."""
    known: dict[int, TensorShard] = {}
    for state, _ in sorted(parts, key=lambda part: part.is_plain):
        for shard in state.tensors:
            known.setdefault(shard.identity, shard)
    names: dict[int, dict[str, None]] = {}
    params: dict[nn.Parameter, tuple[TensorShard, ...]] = {}
    extras: dict[nn.Module, ExtraState] = {}
    for state, _ in parts:
        for shard in state.tensors:
            names.setdefault(shard.identity, {}).update(dict.fromkeys(shard.names))
        params |= state.params
        for extra in state.extras:
            extras.setdefault(extra.module, extra)
    merged = {key: replace(known[key], names=tuple(ordered)) for key, ordered in names.items()}

    def before_write() -> None:
        for state, _ in parts:
            state.before_write()

    return ShardedState(
        tensors=tuple(merged.values()),
        params={
            param: tuple(merged.get(shard.identity, shard) for shard in shards)
            for param, shards in params.items()
        },
        extras=tuple(extras.values()),
        axes=_each_once(axis for state, _ in parts for axis in state.axes),
        before_write=before_write,
    )


def parameter_shards_in(module: nn.Module, rename: Rename = str) -> Iterator[ParameterShards]:
    """What this rank holds of the parameters of any module, under the names that ``rename`` makes.

    Modules with shards in it describe theirs; of any other parameter the rank has all elements.
    """
    plain: dict[nn.Parameter, tuple[TensorShard, ...]] = {}
    known: set[nn.Module] = set()
    for path, inner in _places(module):
        in_model = partial(_joined, rename, path)
        if isinstance(inner, HasShards):
            for shards in inner.parameter_shards() if inner not in known else ():
                yield shards.renamed(in_model)
            known.add(inner)
        else:
            for local, param in inner._parameters.items():
                if param is not None:
                    plain.setdefault(param, (whole_parameter((in_model(local),), param),))
    yield ParameterShards(by_param=plain)


# Names ---------------------------------------------------------------------------------------


def named_state(module: nn.Module) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Parameters and persistent buffers of a plain module, each once, with all of its names.

    The order is that of ``state_dict``, by the first name. The prefix that ``torch.compile`` adds
    to names is left out.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> [names for names, _ in named_state(nn.Sequential(layer, layer))]
        [('0.weight', '1.weight')]
    """
    by_id: dict[int, tuple[list[str], Tensor]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for local, tensor in _own_state(owner):
            name = plain_name(f"{path}.{local}".lstrip("."))
            by_id.setdefault(id(tensor), ([], tensor))[0].append(name)
    for names, tensor in by_id.values():
        yield tuple(names), tensor


def _own_state(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module itself in its ``state_dict``, by local name."""
    for local, param in owner._parameters.items():
        if param is not None:
            yield local, param
    for local, buffer in owner._buffers.items():
        if buffer is not None and local not in owner._non_persistent_buffers_set:
            yield local, buffer


def named_extras(module: nn.Module) -> Iterator[ExtraState]:
    """The modules with extra state, each once."""
    for path, owner in module.named_modules():
        if _has_extra(owner):
            yield ExtraState(plain_name(f"{path}.{_EXTRA}".lstrip(".")), owner)


def _has_extra(owner: nn.Module) -> bool:
    return type(owner).get_extra_state is not nn.Module.get_extra_state
