"""A small model in every way that ranks share one, with backwards that can be made to go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.reference import mse, rows

WIDTH, ROWS = 4, 4
NAN, INF = math.nan, math.inf


class _Spoils(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_full(grad.shape, ctx.value), None


class Block(nn.Module):
    """A layer whose backward goes wrong where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.spoiled: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(torch.tanh(x))
        return x if self.spoiled is None else _Spoils.apply(x, self.spoiled)


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block().double() for _ in range(2)]


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x, y = rows(rank, 2, ROWS, WIDTH, step=step)
    return x, y


# --- every way to share a model ------------------------------------------------------------------


def staged(**axes: int) -> Callable[[World], nn.Module]:
    def make(world: World) -> nn.Module:
        plan = ec.Plan(pp=2, microbatches=2, fsdp={"min_num_params": 0} if "shard" in axes else {},
                       **axes)  # fmt: skip
        return ec.parallelize(blocks(), plan, world, loss_fn=mse)

    return make


def fsdp(world: World, **options: Any) -> nn.Module:
    options = {"units": ec.units.by_type(Block), "min_num_params": 0, **options}
    return ec.FSDP(nn.Sequential(*blocks()), options.pop("group", world.group), **options)


def hybrid(world: World) -> nn.Module:
    mesh = world.mesh(replicate=2, shard=-1)
    return fsdp(
        world,
        group=mesh["shard"],
        replicate=mesh["replicate"],
        strategy=ec.Strategy.HYBRID_SHARD,
    )


WAYS: dict[str, Callable[[World], nn.Module]] = {
    "plain": lambda world: nn.Sequential(*blocks()),
    "DDP": lambda world: ec.DDP(nn.Sequential(*blocks()), world.group),
    "FSDP": fsdp,
    "flat FSDP": lambda world: fsdp(world, use_orig_params=False),
    "hybrid FSDP": hybrid,
    "Pipeline": lambda world: ec.Pipeline(
        [*blocks(), *blocks()], world.group, microbatches=2, loss_fn=mse
    ),
    "DDP in stages": staged(dp=2),
    "FSDP in stages": staged(shard=2),
}


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
    """Forward and backward; the loss where there is one."""
    if isinstance(model, ec.Pipeline):
        return model.step(x, target=y)
    loss = mse(model(x), y)
    loss.backward()
    return loss


def spoil(model: nn.Module, value: float) -> None:
    """Make the backward of this rank's last block go wrong."""
    *_, last = (module for module in model.modules() if isinstance(module, Block))
    last.spoiled = value


def poke(model: nn.Module, value: float) -> None:
    """Write into one gradient of this rank."""
    parts = [ec.local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    next(part for part in parts if part.numel()).view(-1)[0] = value
