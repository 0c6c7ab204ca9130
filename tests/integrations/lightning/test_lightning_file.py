"""States in one file of Lightning's come into DDP and FSDP."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

import echelon as ec
from echelon.integrations.lightning.lightning_file import load_states


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).double()
    groups = [{"params": model[1].parameters(), "lr": 0.1}, {"params": model[0].parameters()}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    optimizer.step()


def goes_on(world: ec.World, shards: bool, file: dict[str, Any]) -> dict[str, Any]:
    module, optimizer = plain()
    options = {"min_num_params": 0} if shards else {}
    model: Any = (ec.FSDP if shards else ec.DDP)(module, world.group, **options)
    load_states(model, [optimizer], copy.deepcopy(file), strict=True)  # torch keeps its tensors
    step(model, optimizer)
    state: dict[str, Any] = model.state_dict()
    return state


@pytest.mark.parametrize("shards", [False, True])
def test_the_next_step_is_that_of_the_plain_model(shards: bool) -> None:
    model, optimizer = plain()
    step(model, optimizer)
    states = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    file = copy.deepcopy(states)
    step(model, optimizer)
    for state in ec.run(goes_on, 2, args=(shards, file)):
        for name, wanted in model.state_dict().items():
            torch.testing.assert_close(state[name], wanted, rtol=1e-12, atol=1e-12)


def test_another_number_of_optimizers_is_refused() -> None:
    model, optimizer = plain()
    with pytest.raises(ec.ArgumentError, match="the states of 0 optimizers, and here are 1"):
        load_states(model, [optimizer], {"state_dict": model.state_dict()}, strict=True)
