"""What forward writes into a parameter, or returns of it, is refused in every world."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from tests.worlds import KINDS, run_world


class Standardised(nn.Linear):
    """Weight standardisation in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.sub_(self.weight.mean()).div_(self.weight.std())
        return super().forward(x)


class Replaced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / 2
        return super().forward(x)


class Lookup(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight[:2].detach()


class Table(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def embed() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4))


WRITING: dict[str, Callable[[], nn.Module]] = {
    "0.weight": embed,
    "1.weight": lambda: nn.Sequential(nn.Embedding(8, 4), Standardised(4, 4)),
    "1.weight'": lambda: nn.Sequential(nn.Embedding(8, 4), Replaced(4, 4)),
}
RETURNING = [
    lambda: nn.Sequential(nn.Embedding(8, 4), Lookup(4, 4)),
    lambda: nn.Sequential(nn.Embedding(8, 4), Table(4, 4)),
]
RULES = [ec.units.whole(), ec.units.by_type(nn.Linear)]


def refusals(world: ec.World) -> list[str]:
    said = []
    index = torch.arange(4) + world.rank
    for make in [*WRITING.values(), *RETURNING]:
        for rule in RULES:
            model = ec.FSDP(make(), world.group, units=rule, min_num_params=0)
            try:
                model(index).sum().backward()
            except ec.StateError as error:
                said.append(str(error))
            else:
                said.append("nothing")
            world.group.barrier()
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_writes_into_a_parameter_is_told_which(kind: str) -> None:
    for said in run_world(kind, refusals, 2):
        told = iter(said)
        for name in WRITING:
            for _ in RULES:
                assert re.search(f"wrote into parameter '{name.rstrip(chr(39))}'", next(told))
        for sentence in told:
            assert "returned a view of its own parameters" in sentence


def keep_outside(world: ec.World) -> float:
    """The ways that the message names."""
    torch.manual_seed(0)
    inner = embed()
    model = ec.FSDP(inner, world.group, ignored=[inner[0]], min_num_params=0)
    model(torch.arange(8)).sum().backward()
    assert model.state_dict()["0.weight"].norm(dim=1).max() <= 1.0 + 1e-6
    torch.manual_seed(0)
    model = ec.FSDP(nn.Linear(4, 4), world.group, min_num_params=0)
    with model.full_parameters(writeback=True), torch.no_grad():
        model.module.weight.copy_(F.normalize(model.module.weight))
    return float(model.state_dict()["weight"].norm(dim=1).max())


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_be_written_is_kept(kind: str) -> None:
    assert run_world(kind, keep_outside, 2) == pytest.approx([1.0, 1.0])


def train_inside(world: ec.World) -> tuple[list[float], float]:
    """A forward, an evaluation and a backward inside the block, and a write between them."""
    torch.manual_seed(0)
    rule = ec.units.by_type(nn.Linear)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = ec.FSDP(inner, world.group, units=rule, min_num_params=0)
    x = torch.full((1, 4), 1.0 + world.rank)
    with model.full_parameters(writeback=True):
        with torch.no_grad():
            inner[0].weight.fill_(2.0)
            inner[0].bias.zero_()
            inner[1].weight.fill_(3.0)
            model(x)
        loss = model(x).sum()
        assert inner[0].weight.shape == (4, 4)
        with pytest.raises(ec.StateError, match="after the block"):
            loss.backward(retain_graph=True)
    loss.backward()
    grads = world.group.all_gather_object(inner[0].weight.grad.tolist())
    return [v for part in grads for v in part], float(model.state_dict()["1.weight"].sum())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_inside_full_parameters_is_that_of_what_was_written(kind: str) -> None:
    for grads, total in run_world(kind, train_inside, 2):
        assert grads == [4.5] * 16
        assert total == 12.0


def write_without_saying_so(world: ec.World) -> None:
    model = ec.FSDP(nn.Linear(4, 4), world.group, min_num_params=0)
    with model.full_parameters(), torch.no_grad():
        model.module.weight.zero_()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_write_that_full_parameters_would_lose_is_refused(kind: str) -> None:
    with pytest.raises(ec.StateError, match="writeback=True"):
        run_world(kind, write_without_saying_so, 2)
