"""A job that resumes from ``ec.load`` goes on as if it had not ended, with torch's optimizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.worlds import run_world

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1, t0=2.0),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
}
SHARDS: dict[str, dict[str, Any]] = {
    "flat": {},
    "rows": {"layout": "rows"},
    "flat parameters": {"use_orig_params": False},
}


def wrapped(world: ec.World, options: dict[str, Any]) -> ec.FSDP:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return ec.FSDP(
        model, world.group, units=ec.units.by_type(nn.Linear), min_num_params=0, **options
    )


def steps(model: ec.FSDP, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.arange(8.0).view(2, 4).sin() + step
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def resumes(world: ec.World, folder: Path, name: str, options: dict[str, Any]) -> None:
    make, kept = OPTIMIZERS[name], folder / name
    model = wrapped(world, options)
    optimizer = make(model.parameters())
    ec.save(kept, step=0, model=model, optimizer=optimizer)  # with what it was made with
    steps(model, optimizer, 0, 3)
    ec.save(kept, step=3, model=model, optimizer=optimizer)
    steps(model, optimizer, 3, 5)
    expected: dict[str, Tensor] = dict(model.state_dict())
    for takes_steps in (0, 1):  # a new job, and one that goes back
        model = wrapped(world, options)
        optimizer = make(model.parameters())
        steps(model, optimizer, 7, 7 + takes_steps)
        ec.load(kept, model=model, optimizer=optimizer)
        steps(model, optimizer, 3, 5)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=0)


def resumes_each(world: ec.World, folder: Path, options: dict[str, Any]) -> None:
    for name in OPTIMIZERS:
        resumes(world, folder, name, options)


@pytest.mark.parametrize("shards", SHARDS)
def test_optimizers_of_torch_go_on_from_a_checkpoint(tmp_path: Path, shards: str) -> None:
    run_world("threads", resumes_each, 2, args=(tmp_path, SHARDS[shards]))
