"""The state of a model in stages, and of an optimizer over them, by the names of the model.

What a stage holds is asked of the stage. Parameters that several stages share have the name of the
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError
from echelon.pipeline.data_parallel import unwrap
from echelon.pipeline.stage_initialization import name_in_model, names_of_state
from echelon.state.model_state import LoadReport, check_state, copy_of
from echelon.state.optimizer_state import gather_states, named_state_dict, names_by_group
from echelon.state.sharded_state import ParameterShards, ShardsByParam, parameter_shards_in

# The model -----------------------------------------------------------------------------------


@runtime_checkable
class SavesParts(Protocol):
    """A stage of whose parameters this rank keeps a part."""

    def sharded_state_dict(self) -> dict[str, Any]:
        """Copies of these parts, by the names of the stage."""

    def load_sharded_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load them again."""


def whole_state(
    stages: Mapping[int, nn.Module],
    placement: Sequence[int],
    group: Group,
    *,
    keep: bool,
    device: torch.device | None,
) -> dict[str, Any]:
    """Copies of the state of all stages, by the names of the model. All ranks call it.

    One stage travels at a time.

    Args:
        stages: of this rank.
        keep: whether this rank wants it; if not, it helps the others and returns nothing.
        device: where copies go; None: that of the group.
    """
    state: dict[str, Any] = {}
    for index, rank in enumerate(placement):
        own: dict[str, Any] | None = None
        if rank == group.rank:
            own = {
                name_in_model(stages[index], index, key): copy_of(value, torch.device("cpu"))
                for key, value in stages[index].state_dict().items()
            }
        found: dict[str, Any] = group.broadcast_object(own, rank)
        if keep:
            home = group.device if device is None else device
            state.update({name: copy_of(value, home) for name, value in found.items()})
    return state


def parts_of(stages: Mapping[int, nn.Module]) -> dict[str, Any]:
    """Copies of what this rank keeps of its stages, by the names of the model."""
    state: dict[str, Any] = {}
    for index, stage in stages.items():
        own = stage.sharded_state_dict() if isinstance(stage, SavesParts) else stage.state_dict()
        state |= {name_in_model(stage, index, key): copy_of(value) for key, value in own.items()}
    return state


def load_parts(
    stages: Mapping[int, nn.Module], state: Mapping[str, Any], *, strict: bool
) -> LoadReport:
    """Load what ``parts_of`` gave on this rank.

    Raises:
        ArgumentError: keys (if ``strict``), sizes or dtypes do not fit.
    """
    check_state(state)
    names = {index: names_of_state(stage, index, state) for index, stage in stages.items()}
    known = {name for own in names.values() for name in own.values()}
    report = LoadReport([], [name for name in state if name not in known])
    for index, stage in stages.items():
        keys = unwrap(stage).state_dict(keep_vars=True)
        missing = [key for key in keys if key not in names[index]]
        report.missing_keys.extend(name_in_model(stage, index, key) for key in missing)
    wrong = [f"{name}: missing" for name in report.missing_keys]
    wrong += [f"{name}: unexpected" for name in report.unexpected_keys]
    if strict and wrong:
        raise ArgumentError(
            f"the sharded state does not fit the stages of this rank: {'; '.join(sorted(wrong))}"
        )
    for index, stage in stages.items():
        own = {key: state[name] for key, name in names[index].items()}
        if isinstance(stage, SavesParts):
            stage.load_sharded_state_dict(own, strict)
        else:
            stage.load_state_dict(own, strict)
    return report


# Optimizers ----------------------------------------------------------------------------------


def stage_parameters(
    stages: Mapping[int, nn.Module], first_names: Mapping[str, str]
) -> Iterator[ParameterShards]:
    """What this rank holds of the parameters of its stages.

    Args:
        first_names: for a shared parameter, by a name of it in the model, the one that counts.
    """

    def name(index: int, local: str) -> str:
        full = name_in_model(stages[index], index, local)
        return first_names.get(full, full)

    for index, stage in stages.items():
        yield from parameter_shards_in(stage, partial(name, index))


def shards_by_param(shards: Sequence[ParameterShards]) -> ShardsByParam:
    """The ranges of all parameters; of one that several stages here share, those of the first."""
    by_param: dict[nn.Parameter, Any] = {}
    for one in shards:
        by_param = {**one.by_param, **by_param}
    return by_param


def gather_stages(
    optimizer: torch.optim.Optimizer, shards: Sequence[ParameterShards], group: Group
) -> dict[str, Any]:
    """The whole state of ``optimizer``, by name, as copies. All ranks of ``group`` call it.

    Raises:
        StateError: the optimizers of the ranks have different groups.
    """
    state: dict[str, Any] = {}
    names: list[list[str]] = [[] for _ in optimizer.param_groups]
    for one in shards:
        state |= gather_states(optimizer, one)
        for own, theirs in zip(names, names_by_group(optimizer, one.by_param), strict=True):
            own += theirs
    told = group.all_gather_object((_to_cpu(state), names))
    together = _together([theirs for _, theirs in told])
    state = {name: value for theirs, _ in told for name, value in theirs.items()}
    return named_state_dict(optimizer, state, together)


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


def _to_cpu(value: Any) -> Any:
    """Copies that may go to another process."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _to_cpu(one) for key, one in value.items()}
    return value
