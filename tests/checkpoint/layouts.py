"""Ways to share one small model over ranks, each of which trains it alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World

ROWS = 24  # of a batch of all ranks: 1, 2, 3 and 4 of them have equal parts

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Optimizers] = {
    "adamw": lambda model: torch.optim.AdamW(groups_of(model), lr=0.05),
    # One group: a flat parameter cannot be in two.
    "adamw-one": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
}


class Odd(nn.Module):
    """A block of dims 7 and 1, with a scalar parameter, a buffer, and a weight that is frozen."""

    def __init__(self, features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(features, 7, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        self.down = nn.Linear(7, 1, dtype=dtype)
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.register_buffer("offset", torch.randn(2, 3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (
            x + self.scale * self.down(torch.tanh(self.up(x))) + self.frozen[0] * self.offset[0, 0]
        )


def make_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Four blocks, of which the last ends in one number."""
    torch.manual_seed(seed)
    blocks = [Odd(5, dtype) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(5, 1, dtype=dtype))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """That of all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS, 5, generator=generator, dtype=dtype)
    return x, torch.randn(ROWS, 1, generator=generator, dtype=dtype)


@dataclass
class Trainee:
    """A model that is shared, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    line: int
    lines: int

    def train(self, step: int) -> float:
        """One step; the loss of the whole batch, on every rank that is told."""
        x, y = batch(step, next(self.model.parameters()).dtype)
        rows = slice(self.line * ROWS // self.lines, (self.line + 1) * ROWS // self.lines)
        if isinstance(self.model, ec.Pipeline):
            found = self.model.step(x[rows], target=y[rows], loss_everywhere=True)
        else:
            found = mse(self.model(x[rows]), y[rows])
            found.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(found.detach())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, by whether a parameter decays, and one without parameters."""
    named = list(model.named_parameters())
    decays = [p for name, p in named if "up" in name]
    others = [p for name, p in named if "up" not in name]
    return [
        {"params": decays, "weight_decay": 0.1},
        {"params": [], "weight_decay": 0.3},
        {"params": others, "weight_decay": 0.0},
    ]


@dataclass(frozen=True)
class Layout:
    """A technique on a number of ranks.

    Attributes:
        plan: its axes.
        fsdp: options of it.
        schedule: of the pipeline.
    """

    plan: str
    fsdp: tuple[tuple[str, Any], ...] = ()
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.parsed.num_ranks

    @property
    def parsed(self) -> ec.Plan:
        options: dict[str, Any] = {}
        if "pp" in self.plan:
            chunks = 2 if self.schedule in ("zb-v", "interleaved") else 1
            options = {"microbatches": 2, "schedule": self.schedule, "chunks": chunks}
        if self.fsdp:
            options["fsdp"] = dict(self.fsdp)
        return ec.Plan.parse(self.plan, **options)

    def trainee(self, world: World, optimizer: str = "adamw", seed: int = 0) -> Trainee:
        """A new one, with values that ``seed`` gives."""
        plan, model = self.parsed, make_model(seed=seed)
        lines = plan.dp * plan.shard
        units = ec.units.by_type(Odd) if plan.shard > 1 else None
        if plan.num_ranks == 1:
            shared: nn.Module = model
        elif plan.pp > 1:
            stages = [copy.deepcopy(one) for one in cut(model, plan.pp * plan.chunks)]
            shared = ec.parallelize(stages, plan, world, loss_fn=mse, units=units)
        else:
            shared = ec.parallelize(model, plan, world, units=units)
        made = OPTIMIZERS[optimizer](shared)
        return Trainee(shared, made, world.rank % lines, lines)


def cut(model: nn.Sequential, stages: int) -> list[nn.Module]:
    """Parts that know their names in the model."""
    return list(ec.pipeline.split(model, stages))


FLAT = (("use_orig_params", False), ("min_num_params", 0))
SMALL = (("min_num_params", 0),)
ROWWISE = (("layout", "rows"), ("min_num_params", 0))

LAYOUTS: Mapping[str, Layout] = {
    "plain": Layout("dp=1"),
    "ddp2": Layout("dp=2"),
    "ddp3": Layout("dp=3"),
    "ddp4": Layout("dp=4"),
    "fsdp2": Layout("shard=2", SMALL),
    "fsdp3": Layout("shard=3", SMALL),
    "fsdp4": Layout("shard=4", SMALL),
    "fsdp3-rows": Layout("shard=3", ROWWISE),
    "fsdp2-flat": Layout("shard=2", FLAT),
    "fsdp2-whole": Layout("shard=2"),
    "hybrid4": Layout("dp=2,shard=2", SMALL),
    "pp2": Layout("pp=2"),
    "pp3": Layout("pp=3"),
    "pp2-zbv": Layout("pp=2", schedule="zb-v"),
    "pp2-dp2": Layout("pp=2,dp=2"),
    "pp2-shard2": Layout("pp=2,shard=2", SMALL),
}
