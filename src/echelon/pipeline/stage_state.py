"""The state of a model in stages by the names of the model: state dicts, and shards of a rank.

A shared parameter has the name of its first stage in state dicts, and all its names in shards::

                   stage 0        stage 1
    replica 0   │  w: copy 0      w: copy 2      w is shared by both stages, and reduced over all
    replica 1   │  w: copy 1      w: copy 3      ranks that have it, so all copies are identical
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError
from echelon.errors.message_text import misfit_text
from echelon.modules.compiled import compiled_inside, plain_name, versions_of, with_versions
from echelon.pipeline.data_parallel import unwrap
from echelon.pipeline.splitting.submodule import Submodule, state_names
from echelon.state.model_state import LoadReport, check_state, copy_of
from echelon.state.optimizer_state import gather_states, named_state_dict, names_by_group
from echelon.state.sharded_state import (
    ModelParts,
    ParameterShards,
    ShardedState,
    ShardsByParam,
    axes_in,
    named_state,
    parameter_shards_in,
)
from echelon.state.state_copy import as_copy
from echelon.state.tensor_shard import Replication, TensorShard

# Names in the model --------------------------------------------------------------------------


def name_in_model(stage: nn.Module, index: int, name: str) -> str:
    """The name in the model of what stage ``index`` calls ``name``.

    Example:
        >>> name_in_model(nn.Linear(1, 1), 3, "bias")
        '3.bias'
    """
    name = plain_name(name)
    return name if find_submodule(stage) is not None else f"{index}.{name}".rstrip(".")


def parameter_name(stage: nn.Module, index: int, name: str) -> str:
    """The name in the model of a parameter of a stage; a flat one is of the stage alone.

    Example:
        >>> parameter_name(nn.Linear(1, 1), 3, "bias")
        '3.bias'
    """
    submodule, in_model = find_submodule(stage), name_in_model(stage, index, name)
    is_plain = submodule is None or in_model in state_names(submodule)
    return in_model if is_plain else f"stages.{index}.{name}"


def names_of_state(stage: nn.Module, index: int, names: Iterable[str]) -> dict[str, str]:
    """Those ``names`` in the model that belong to stage ``index``, by their names in the stage.

    Example:
        >>> names_of_state(nn.Linear(1, 1), 3, ["3.bias", "4.bias"])
        {'bias': '3.bias'}
    """
    submodule = find_submodule(stage)
    if submodule is not None:
        known = state_names(submodule)
        return {plain_name(name): name for name in names if plain_name(name) in known}
    start = f"{index}."
    local = [name for name in names if name.startswith(start)]
    return {plain_name(name.removeprefix(start)): name for name in local}


def find_submodule(stage: nn.Module) -> Submodule | None:
    """The stage that ``split`` made, inside of ``torch.compile``, ``DDP`` and ``FSDP``."""
    module: nn.Module | None = stage
    while module is not None and not isinstance(module, Submodule):
        compiled = compiled_inside(module)
        module = module._modules.get("module") if compiled is None else compiled
    return module


def state_in_stage(
    stage: nn.Module, index: int, state: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """What of a state of the model a stage has, with the versions of its modules.

    ``names`` has the names in the state by those in the stage.
    """
    versions = versions_of(state)
    paths = [path for path, _ in stage.named_modules(remove_duplicate=False)]
    return with_versions(
        {key: state[name] for key, name in names.items()},
        {path: versions.get(name_in_model(stage, index, path), {}) for path in paths},
    )


def _named_in_model(
    stage: nn.Module, index: int, state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a stage, and the versions of its modules, by their names in the model."""
    tensors, versions = (
        {name_in_model(stage, index, name): value for name, value in named.items()}
        for named in (state, versions_of(state))
    )
    return tensors, versions


# State dicts of the model --------------------------------------------------------------------


@runtime_checkable
class SavesShards(Protocol):
    """A stage whose parameters are sharded."""

    def sharded_state_dict(self) -> dict[str, Any]:
        """Copies of the shards of this rank, by the names of the stage."""

    def load_sharded_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load what ``sharded_state_dict`` returned."""


def full_state(
    stages: Mapping[int, nn.Module],
    placement: Sequence[int],
    group: Group,
    *,
    keep: bool,
    device: torch.device | None,
) -> dict[str, Any]:
    """Copies of the state of all stages, by the names of the model. All ranks call it.

    One stage travels at a time. Without ``keep`` this rank only helps the others and returns
    nothing. Copies are on ``device``, or on that of the group if it is None.
    """
    state: dict[str, Any] = {}
    all_versions: dict[str, Any] = {}
    for index, rank in enumerate(placement):
        local_state: tuple[dict[str, Any], dict[str, Any]] | None = None
        if rank == group.rank:
            tensors, versions = _named_in_model(stages[index], index, stages[index].state_dict())
            cpu = torch.device("cpu")
            local_state = {name: copy_of(v, cpu) for name, v in tensors.items()}, versions
        tensors, versions = group.broadcast_object(local_state, rank)
        if keep:
            home = group.device if device is None else device
            state |= {name: as_copy(copy_of(value, home)) for name, value in tensors.items()}
            all_versions |= versions
    return with_versions(state, all_versions)


def sharded_state(stages: Mapping[int, nn.Module]) -> dict[str, Any]:
    """Copies of what this rank keeps of its stages, by the names of the model."""
    state: dict[str, Any] = {}
    all_versions: dict[str, Any] = {}
    for index, stage in stages.items():
        kept = stage.sharded_state_dict() if isinstance(stage, SavesShards) else stage.state_dict()
        tensors, versions = _named_in_model(stage, index, kept)
        state |= {name: as_copy(copy_of(value)) for name, value in tensors.items()}
        all_versions |= versions
    return with_versions(state, all_versions)


def load_sharded_state(
    stages: Mapping[int, nn.Module], state: Mapping[str, Any], *, strict: bool
) -> LoadReport:
    """Load what ``sharded_state`` returned on this rank."""
    check_state(state)
    names, report = names_that_fit(stages, state, "the sharded state", strict=strict)
    for index, stage in stages.items():
        stage_state = state_in_stage(stage, index, state, names[index])
        if isinstance(stage, SavesShards):
            stage.load_sharded_state_dict(stage_state, strict)
        else:
            stage.load_state_dict(stage_state, strict)
    return report


def names_that_fit(
    stages: Mapping[int, nn.Module],
    state: Mapping[str, Any],
    what: str,
    *,
    of_others: Container[str] = (),
    strict: bool,
) -> tuple[dict[int, dict[str, str]], LoadReport]:
    """For each stage the names in a state by those in the stage; and what does not fit.

    ``of_others`` are names in the model that stages of other ranks have.

    Raises:
        ArgumentError: with ``strict``, a key is missing or belongs to no stage.
    """
    names = {index: names_of_state(stage, index, state) for index, stage in stages.items()}
    known = {name for names_of_stage in names.values() for name in names_of_stage.values()}
    unexpected = [name for name in state if name not in known and plain_name(name) not in of_others]
    report = LoadReport([], unexpected)
    for index, stage in stages.items():
        keys = unwrap(stage).state_dict(keep_vars=True)
        missing = [key for key in keys if key not in names[index]]
        report.missing_keys.extend(name_in_model(stage, index, key) for key in missing)
    if strict and (report.missing_keys or report.unexpected_keys):
        text = misfit_text(report.missing_keys, report.unexpected_keys, [])
        raise ArgumentError(f"{what} does not fit the stages of this rank: {text}")
    return names, report


# State dicts of optimizers -------------------------------------------------------------------


def stage_parameters(
    stages: Mapping[int, nn.Module], first_names: Mapping[str, str]
) -> Iterator[ParameterShards]:
    """The shards of the parameters of this rank's stages.

    ``first_names`` has the first name of shared parameters, by each of their other names.
    """

    def name(index: int, local: str) -> str:
        full = name_in_model(stages[index], index, local)
        return first_names.get(full, full)

    for index, stage in stages.items():
        yield from parameter_shards_in(stage, partial(name, index))


def shards_by_param(shards: Sequence[ParameterShards]) -> ShardsByParam:
    """The shards of all stages by parameter; those of the first stage if several share one."""
    by_param: dict[nn.Parameter, Any] = {}
    for stage_shards in shards:
        by_param = {**stage_shards.by_param, **by_param}
    return by_param


@torch.inference_mode(mode=False)  # the copies outlive the caller's mode
def gather_optimizer_state(
    optimizer: torch.optim.Optimizer, shards: Sequence[ParameterShards], group: Group
) -> dict[str, Any]:
    """Copies of the full state of ``optimizer``, by name. All ranks of ``group`` call it."""
    local_state: dict[str, Any] = {}
    names: list[list[str]] = [[] for _ in optimizer.param_groups]
    for stage_shards in shards:
        local_state |= gather_states(optimizer, stage_shards)
        by_group = names_by_group(optimizer, stage_shards.by_param)
        for all_names, stage_names in zip(names, by_group, strict=True):
            all_names += stage_names
    states, names_by_rank = zip(
        *group.all_gather_object((_to_cpu(local_state), names)), strict=True
    )
    state = {name: value for rank_state in states for name, value in rank_state.items()}
    return named_state_dict(optimizer, state, _merge_groups(names_by_rank))


def names_on_all_ranks(
    optimizer: torch.optim.Optimizer, shards: ShardsByParam, group: Group
) -> list[list[str]]:
    """The names of the parameters in each group, to load them. All ranks of ``group`` call it.

    Raises:
        StateError: the optimizers of the ranks have different groups.
    """
    what = "load_optimizer_state_dict(), which all ranks call"
    names = group.all_gather_object(names_by_group(optimizer, shards), label=what)
    return _merge_groups(names)


def _merge_groups(names_by_rank: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """The names in each parameter group, of all ranks."""
    counts = [len(groups) for groups in names_by_rank]
    if len(set(counts)) > 1:
        raise StateError(
            f"the optimizers of the ranks have different numbers of groups, {counts} by rank: make "
            "the same groups on all ranks"
        )
    merged: list[list[str]] = [[] for _ in range(counts[0])]
    group_of: dict[str, int] = {}
    for groups in names_by_rank:
        for i, names in enumerate(groups):
            for name in names:
                if name not in group_of:
                    group_of[name] = i
                    merged[i].append(name)
                elif group_of[name] != i:
                    raise StateError(
                        f"the shared parameter {name!r} is in different groups of the optimizers "
                        "of the ranks, so its copies would drift apart: put it into the same group "
                        "on all ranks"
                    )
    return merged


def _to_cpu(value: Any) -> Any:
    """Copies in the memory of the host, which can be sent to another process."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _to_cpu(item) for key, item in value.items()}
    return value


# Shards of a rank, for checkpoints -----------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class _Shared:
    """A tensor that several stages may have.

    Attributes:
        names: its names in the model, those of the first stage first.
        owners: the ranks of the pipeline that have it, in ascending order.
    """

    names: tuple[str, ...]
    owners: tuple[int, ...]


@final
class StageShards:
    """The ``local`` stages of one rank as shards of the model. All ranks of ``group`` make one.

    ``stages`` are all stages that this rank knows, ``replicate`` is that of ``Pipeline``, and
    ``num_ranks`` is the largest number of ranks that have replicas or shards of one stage.
    """

    def __init__(
        self,
        local: Mapping[int, nn.Module],
        stages: Sequence[nn.Module | None],
        group: Group,
        replicate: Group | None,
        num_ranks: int,
    ) -> None:
        self._local, self._group = dict(local), group
        self._replicate, self._num_ranks = replicate, num_ranks
        names_by_rank = group.all_gather_object([*_names_of_shared(local, stages)])
        self._shared = _merge_shared(names_by_rank)

    @property
    def axes(self) -> tuple[Group, ...]:
        """The groups over which the model is sharded or replicated."""
        replicate = () if self._replicate is None else (self._replicate,)
        return (self._group, *replicate, *self._stage_axes())

    def _stage_axes(self) -> list[Group]:
        axes = (axis for stage in self._local.values() for axis in axes_in(stage))
        return list({axis.ranks: axis for axis in axes}.values())

    def holdings(self) -> ShardedState:
        """The shards that this rank holds, by the names of the model."""
        stages = ((partial(name_in_model, stage, i), stage) for i, stage in self._local.items())
        state = ModelParts(list(stages)).state(*self._copies())
        return replace(state.changed(self._with_owners), axes=self.axes)

    def _copies(self) -> tuple[int, int]:
        """This rank's number among the ranks that have the same stages, and their number."""
        axes = self._stage_axes() if self._replicate is None else [self._replicate]
        copy, num_copies = 0, 1
        for axis in axes:
            copy, num_copies = copy * axis.size + axis.rank, num_copies * axis.size
        if num_copies < self._num_ranks:
            raise ArgumentError(
                f"stages {list(self._local)} of this rank are in no DDP or FSDP, and another stage "
                f"is shared by {self._num_ranks} ranks, so it is not known which ranks have these: "
                "give ec.Pipeline replicate=, the ranks that have the same stages; ec.parallelize "
                "does"
            )
        return copy, num_copies

    def _with_owners(self, shard: TensorShard) -> TensorShard:
        """The shard with the names and the copies of all stages that have the tensor."""
        shared = self._shared.get(shard.name)
        if shared is None:
            return shard
        position, num_owners = shared.owners.index(self._group.rank), len(shared.owners)
        replication = shard.replication
        if not isinstance(shard.tensor, nn.Parameter):
            if num_owners > 1:
                replication = Replication.PER_RANK  # every stage changes its own buffer
        elif self._replicate is not None or shard.num_copies == 1:
            replication = Replication.IDENTICAL  # it is reduced over all ranks that have it
        return replace(
            shard,
            names=shared.names,
            copy=position * shard.num_copies + shard.copy,
            num_copies=num_owners * shard.num_copies,
            replication=replication,
        )


def _names_of_shared(
    local: Mapping[int, nn.Module], stages: Sequence[nn.Module | None]
) -> Iterator[tuple[str, ...]]:
    """The names of each tensor of this rank that other stages may also have.

    These are the parameters that several known stages have, and all buffers: a rank that does not
    have the stages of others cannot know which buffers they share.
    """
    names: dict[int, dict[str, None]] = {}  # by tensor, in order
    stages_of: dict[int, set[int]] = {}  # by tensor
    for index, stage in enumerate(stages):
        if stage is not None:
            for local_names, tensor in named_state(stage):
                full_names = dict.fromkeys(
                    name_in_model(stage, index, name) for name in local_names
                )
                names.setdefault(id(tensor), {}).update(full_names)
                stages_of.setdefault(id(tensor), set()).add(index)
    for stage in local.values():
        for _, tensor in named_state(stage):
            if not isinstance(tensor, nn.Parameter) or len(stages_of[id(tensor)]) > 1:
                yield tuple(names[id(tensor)])


def _merge_shared(names_by_rank: Sequence[Sequence[tuple[str, ...]]]) -> dict[str, _Shared]:
    """The tensors that ranks share, by each of their names."""
    merged: dict[str, tuple[dict[str, None], set[int]]] = {}
    for rank, tensors in enumerate(names_by_rank):
        for names in tensors:
            all_names: dict[str, None] = {}
            owners = {rank}
            for known_names, known_owners in [merged[name] for name in names if name in merged]:
                all_names |= known_names
                owners |= known_owners
            all_names |= dict.fromkeys(names)
            merged |= dict.fromkeys(all_names, (all_names, owners))
    return {
        name: _Shared(tuple(names), tuple(sorted(owners)))
        for name, (names, owners) in merged.items()
    }
