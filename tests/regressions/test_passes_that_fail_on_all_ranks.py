"""A pass that raises on all ranks leaves nothing that the next one stumbles over."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.worlds import KINDS, run_world

WIDTH = 4


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError("in backward")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, fails: str | None) -> Tensor:
        if fails == "forward":
            raise ValueError("in forward")
        x = x + torch.tanh(self.linear(x))
        return Fails.apply(x) if fails == "backward" else x  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(
        self, x: Tensor, used: Sequence[int] = (0, 1, 2), fails: tuple[int, str] | None = None
    ) -> Tensor:
        x = self.first(x)
        for i in used:
            x = self.blocks[i](x, fails[1] if fails is not None and fails[0] == i else None)
        return x.square().mean()


def rows(rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


def build(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def fails_between(world: ec.World) -> None:
    """A forward that fails, between a forward in which ranks skip units and its backward."""
    model, plain = build(torch.float64), build(torch.float64)
    wrapped = ec.FSDP(model, world.group, units=ec.units.by_type(Block), min_num_params=0)
    used = [[0, 1], [0, 1, 2]]
    for _ in range(2):
        wrapped(rows(0).double()).backward()
    wrapped.zero_grad()
    loss = wrapped(rows(world.rank).double(), used[world.rank])
    with pytest.raises(ValueError, match="in forward"):
        wrapped(rows(world.rank).double(), [0], (0, "forward"))
    loss.backward()
    for rank in range(world.size):
        (plain(rows(rank).double(), used[rank]) / world.size).backward()
    for param, expected in zip(wrapped.unwrap().parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_fails_does_not_change_the_backward_of_an_earlier_one(kind: str) -> None:
    run_world(kind, fails_between, 2, timeout=20)


def goes_on(world: ec.World) -> None:
    precisions = (None, ec.MixedPrecision(compute=torch.bfloat16))
    strategies = (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP)
    for precision in precisions:
        for strategy in strategies:
            for where in ("forward", "backward"):
                options: dict[str, Any] = {"precision": precision, "strategy": strategy}
                options |= {"units": ec.units.by_type(Block), "min_num_params": 0}
                failed = ec.FSDP(build(torch.float32), world.group, **options)
                other = ec.FSDP(build(torch.float32), world.group, **options)
                with pytest.raises(ValueError, match="in "):
                    failed(rows(world.rank), (0, 1, 2), (1, where)).backward()
                failed.zero_grad()
                for model in (failed, other):
                    model(rows(world.rank)).backward()
                for one, expected in zip(failed.parameters(), other.parameters(), strict=True):
                    assert one.grad is not None
                    assert expected.grad is not None
                    assert torch.equal(one.grad.detach(), expected.grad.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_after_a_pass_that_failed_on_all_ranks(kind: str) -> None:
    run_world(kind, goes_on, 2, timeout=20)
