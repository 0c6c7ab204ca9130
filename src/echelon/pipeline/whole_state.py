"""The state of a model in stages: all of it on one rank, or the parts that each rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.pipeline.data_parallel import unwrap
from echelon.pipeline.stage_initialization import name_in_model, names_of_state


@runtime_checkable
class SavesParts(Protocol):
    """A stage of whose parameters this rank keeps a part."""

    def sharded_state_dict(self) -> dict[str, Any]:
        """Copies of these parts, by the names of the stage."""

    def load_sharded_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load them again."""


class LoadReport(NamedTuple):
    """Keys of a state dict that do not fit; as ``nn.Module.load_state_dict`` returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


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
                name_in_model(stages[index], index, key): _moved(value, torch.device("cpu"))
                for key, value in stages[index].state_dict().items()
            }
        found: dict[str, Any] = group.broadcast_object(own, rank)
        if keep:
            home = group.device if device is None else device
            state.update({name: _moved(value, home) for name, value in found.items()})
    return state


def parts_of(stages: Mapping[int, nn.Module]) -> dict[str, Any]:
    """Copies of what this rank keeps of its stages, by the names of the model."""
    state: dict[str, Any] = {}
    for index, stage in stages.items():
        own = stage.sharded_state_dict() if isinstance(stage, SavesParts) else stage.state_dict()
        state |= {
            name_in_model(stage, index, key): _moved(value, None) for key, value in own.items()
        }
    return state


def load_parts(
    stages: Mapping[int, nn.Module], state: Mapping[str, Any], *, strict: bool
) -> LoadReport:
    """Load what ``parts_of`` gave on this rank.

    Raises:
        ArgumentError: keys (if ``strict``), sizes or dtypes do not fit.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(f"the state is {state!r:.80}; give a dict of tensors by name")
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


def _moved(value: Any, device: torch.device | None) -> Any:
    """A copy."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(value.device if device is None else device, copy=True)
