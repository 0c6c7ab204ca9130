"""Checkpoints in one file, as Lightning's own strategies write them, loaded into what we wrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from echelon.errors import ArgumentError
from echelon.fsdp import FSDP


def load_states(
    model: nn.Module, optimizers: Sequence[Optimizer], file: Mapping[str, Any], *, strict: bool
) -> None:
    """Load weights, and the states of optimizers if there are any. Nothing is communicated.

    Raises:
        ArgumentError: the file is of another number of optimizers.
    """
    states = file.get("optimizer_states", [])
    if len(states) != len(optimizers) and optimizers:
        raise ArgumentError(
            f"the file has the states of {len(states)} optimizers, and here are {len(optimizers)}"
        )
    model.load_state_dict(file["state_dict"], strict=strict)
    for optimizer, state in zip(optimizers, states, strict=False):
        if isinstance(model, FSDP):
            model.load_optimizer_state_dict(optimizer, _by_name(model, optimizer, state))
        else:
            optimizer.load_state_dict(state)


def _by_name(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state that counts parameters in the order of the optimizer, by their names."""
    name_of = {param: name for name, param in model.named_parameters()}
    names = [name_of[param] for group in optimizer.param_groups for param in group["params"]]
    groups = [
        {**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]
    ]
    return {"state": {names[i]: of for i, of in state["state"].items()}, "param_groups": groups}
