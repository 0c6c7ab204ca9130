"""The state of an optimizer is restored with every bit, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.errors import ArgumentError, UnsupportedError
from tests.checkpoint.whole import check_equal


def stepped(optimizer: Any, dtype: torch.dtype, steps: int = 3) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2).to(dtype)
    made = optimizer(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        made.step()
    return model, made


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.ASGD])
def test_numbers_of_an_optimizer_keep_their_dtype(optimizer: Any, tmp_path: Path) -> None:
    model, first = stepped(optimizer, torch.bfloat16)
    ec.save(tmp_path, step=3, model=model, optimizer=first)
    model, second = stepped(optimizer, torch.bfloat16, steps=1)
    ec.load(tmp_path, model=model, optimizer=second)
    check_equal(second.state_dict()["state"], first.state_dict()["state"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda o: o.param_groups[0]["params"].pop(), r"a state of a parameter of shape \(2,\)"),
        (lambda o: o.state.update(seen=3), "a state of 'seen' that is in none of its groups"),
        (lambda o: o.state.update({o.param_groups[0]["params"][0]: [1]}), r"keeps \[1\] as the"),
        (lambda o: o.state[o.param_groups[0]["params"][0]].update({0: 1}), "keys are names"),
    ],
)
@pytest.mark.parametrize("call", ["save", "load"])
def test_a_state_that_is_no_parameter_s_or_has_no_names_is_refused(
    call: str, spoil: Any, message: str, tmp_path: Path
) -> None:
    model, optimizer = stepped(torch.optim.Adam, torch.float32)
    ec.save(tmp_path, step=3, model=model, optimizer=optimizer)
    spoil(optimizer)
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        if call == "save":
            ec.save(tmp_path, step=4, model=model, optimizer=optimizer)
        else:
            ec.load(tmp_path, model=model, optimizer=optimizer)
    assert ec.steps(tmp_path) == [3]


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = stepped(torch.optim.Adam, torch.float32)
    values = torch.arange(3)
    with torch.device("meta"):
        ec.save(tmp_path, step=3, model=model, optimizer=optimizer, values=values)
        loaded = ec.load(tmp_path, model=model, optimizer=optimizer)
    check_equal(loaded.values["values"], values)
