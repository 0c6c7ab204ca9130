"""The state of a trainee put together without checkpoints, to compare with what one gives."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

import echelon as ec
from tests.checkpoint.layouts import Trainee

State = dict[str, Any]


def whole_state(trainee: Trainee) -> State:
    """Model and optimizer by plain names, on every rank; all ranks call it.

    Whole tensors are what the wrappers' own state dicts give, which checkpoints do not use.
    """
    model, optimizer = trainee.model, trainee.optimizer
    if isinstance(model, ec.FSDP):
        return {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
    if isinstance(model, ec.Pipeline):
        return {
            "model": model.whole_state_dict(),
            "optimizer": model.optimizer_state_dict(optimizer),
        }
    plain = model.module if isinstance(model, ec.DDP) else model
    names = {param: name for name, param in plain.named_parameters()}
    state = {names[param]: copy.deepcopy(own) for param, own in optimizer.state.items()}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[param] for param in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    model_state = {key: value.detach().clone() for key, value in plain.state_dict().items()}
    return {"model": model_state, "optimizer": {"state": state, "param_groups": groups}}


def check_equal(found: Any, expected: Any, where: str = "") -> None:
    """Refuse anything but the same bits; groups of parameters may list them in another order."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), where
        assert found.dtype == expected.dtype, where
        assert torch.equal(found.reshape(-1), expected.reshape(-1)), where
        assert found.shape == expected.shape, where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            check_equal(found[key], expected[key], f"{where}.{key}")
    elif where.endswith(".params"):
        assert sorted(found) == sorted(expected), where
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, one in enumerate(expected):
            check_equal(found[i], one, f"{where}[{i}]")
    else:
        assert found == expected, where
