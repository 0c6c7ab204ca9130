"""A parameter for which an ``autograd.Function`` returns None has no gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec


class Blocked(torch.autograd.Function):
    """The identity; None goes back, and on through everything before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)])

    def forward(self, x: Tensor, blocked: int) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x)
            x = x + (Blocked.apply(y) if i == blocked else y.tanh())
        return x


def loss_of(model: nn.Module, step: int, rank: int, case: str) -> Tensor:
    x = torch.full((2, 3), 1.0 + step + rank, dtype=torch.float64)
    return model(x, step if case == "all" else (step + rank) % 3).square().mean()


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def plain(case: str, num_ranks: int) -> list[list[Tensor | None]]:
    found = []
    for step in range(3):
        model = Blocks()
        for rank in range(num_ranks):
            (loss_of(model, step, rank, case) / num_ranks).backward()
        found.append(gradients_of(model))
    return found


def train(world: ec.World, case: str, options: dict[str, Any]) -> list[list[Tensor | None]]:
    model = ec.DDP(Blocks(), world.group, **options)
    found = []
    for step in range(3):
        model.zero_grad()
        loss_of(model, step, world.rank, case).backward()
        if options.get("sync") == "manual":
            model.sync_gradients()
        found.append(gradients_of(model))
    return found


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 0, "first_bucket_bytes": 0},
                                     {"sync": "manual"}])  # fmt: skip
@pytest.mark.parametrize("case", ["all", "by rank"])
def test_it_counts_as_unused(case, options) -> None:
    expected = plain(case, 2)
    for found in ec.run(train, 2, args=(case, options)):
        for steps in zip(found, expected, strict=True):
            for mine, theirs in zip(*steps, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_a_hook_that_came_first_takes_a_gradient_away_when_it_is_reduced() -> None:
    def main(world: ec.World) -> None:
        module = nn.Linear(2, 1)
        module.bias.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        model = ec.DDP(module, world.group)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            assert module.bias.grad is None
            unused = model.unused_parameters()
            assert not unused.here
            assert not unused.everywhere

    ec.run(main, 2)
