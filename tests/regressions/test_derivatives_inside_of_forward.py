"""``torch.autograd.grad`` inside of a forward: units that it is in stay whole."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.reference import train_alone


class Inner(nn.Linear):
    """A unit inside of another one."""


class Outer(nn.Module):
    """Goes down the slope of its own inner unit, and then through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), Inner(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(point).tanh().square().sum(), point)
        return self.inner(x - slope).tanh() @ self.first.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Outer(), Outer()])
        self.last = nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        with torch.enable_grad():
            point = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.last(self.blocks[0](point)).sum(), point)
        x = x - slope
        for block in self.blocks:
            x = block(x)
        if fails:
            raise KeyError("no output today")
        return self.last(x)


def rows(step: int, rank: int) -> Tensor:
    return torch.full((2, 3), 0.3 + step + rank, dtype=torch.float64)


def plain(num_ranks: int) -> dict[str, Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(step: int) -> Iterator[Tensor]:
        for rank in range(num_ranks):
            for other in (0, 5, 9):
                yield model(rows(step, rank + other)).square().mean() / num_ranks

    return train_alone(model, optimizer, 3, losses)


def train(world: ec.World, options: dict[str, Any]) -> dict[str, Tensor]:
    units = ec.units.by_type(Outer, Inner)
    model = ec.FSDP(Model(), world.group, units=units, min_num_params=0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(rows(step, world.rank)).square().mean()
        with torch.no_grad():
            model(rows(step, world.rank))
        loss.backward()
        with model.no_sync():
            model(rows(step, world.rank + 5)).square().mean().backward()
        model(rows(step, world.rank + 9)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "rows"},
        {"strategy": ec.Strategy.SHARD_OPTIMIZER},
        {"use_orig_params": False},
        {"offload": ec.Offload.ALL, "forward_prefetch": 2},  # gathers communicate
        {"offload": ec.Offload.ALL, "backward_prefetch": ec.BackwardPrefetch.POST},
    ],
)
def test_weights_are_those_of_one_process(options) -> None:
    expected = plain(2)
    for state in ec.run(train, 2, args=(options,)):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-13, msg=name)


def test_a_forward_that_failed_is_not_under_way_any_more() -> None:
    def main(world: ec.World) -> None:
        model = ec.FSDP(Model(), world.group, units=ec.units.by_type(Outer), min_num_params=0)
        loss = model(rows(0, world.rank)).square().mean()
        with pytest.raises(KeyError):
            model(rows(1, world.rank), fails=True)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(param.dim() == 1 for param in model.parameters())  # parts

    ec.run(main, 2)
