"""A frozen base with adapters, tied and shared weights, trains and resumes as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec

ROWS, WORDS, WIDTH = 12, 11, 6


class Adapted(nn.Module):
    """A frozen linear layer in the dtype of the base, and a trained correction of rank 2."""

    def __init__(self, base: torch.dtype, adapter: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=base).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH, dtype=adapter))
        self.b = nn.Parameter(torch.randn(WIDTH, 2, dtype=adapter))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return torch.tanh(base + x @ self.a.T @ self.b.T)


class Net(nn.Module):
    """The head is tied to the embedding, and the last block shares an adapter with the first."""

    def __init__(self, base: torch.dtype, adapter: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=adapter)
        self.blocks = nn.ModuleList(Adapted(base, adapter) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False, dtype=adapter)
        self.head.weight = self.embed.weight
        self.blocks[3].a = self.blocks[0].a

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).double(), target.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (2, ROWS, 5), generator=generator)
    return tokens[0], tokens[1]


PLANS = {
    "1f1b": ec.Plan(pp=2, microbatches=2),
    "zero bubble": ec.Plan(pp=2, microbatches=2, schedule="zb-h1"),
    "sharded stages": ec.Plan(pp=2, shard=2, microbatches=2),
}
SHARDED: dict[str, dict[str, Any]] = {
    "full shard": {},
    "rows": {"layout": "rows"},
    "zero-2": {"strategy": ec.Strategy.SHARD_GRAD_OP},
    "no shard": {"strategy": ec.Strategy.NO_SHARD},
    "one parameter": {"use_orig_params": False},
}
KINDS = ["ddp", *SHARDED, *PLANS]


def ranks_of(kind: str) -> int:
    return PLANS[kind].pp * PLANS[kind].shard if kind in PLANS else 2


def wrapped(kind: str, model: nn.Module, world: ec.World) -> nn.Module:
    units = ec.units.by_type(Adapted)
    if kind == "plain":
        return model
    if kind == "ddp":
        return ec.DDP(model, world.group)
    if kind in SHARDED:
        return ec.FSDP(model, world.group, units=units, **SHARDED[kind])
    plan = PLANS[kind]
    rule = {"units": units} if plan.shard > 1 else {}
    return ec.parallelize(model, plan, world, loss_fn=token_loss, **rule)


def trained(
    world: ec.World, kind: str, dtypes: tuple[torch.dtype, ...], steps: range, folder: Path | None
) -> dict[str, Tensor]:
    """The weights after some steps, resumed from a folder if they are not the first."""
    torch.manual_seed(steps.start)  # a resumed one begins with other values
    model = wrapped(kind, Net(*dtypes), world)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if steps.start:
        ec.load(folder, model=model, optimizer=optimizer, group=world.group)
    for step in steps:
        tokens, target = batch(step)
        if isinstance(model, ec.Pipeline):
            shard = PLANS[kind].shard
            rows = slice(world.rank % shard, None, shard)
            model.step(tokens[rows], target=target[rows])
        else:
            rows = slice(world.rank, None, world.size)
            token_loss(model(tokens[rows]), target[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None and not steps.start:
        ec.save(folder, step=steps.stop, model=model, optimizer=optimizer, group=world.group)
    if isinstance(model, ec.Pipeline):
        return model.whole_state_dict()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", [torch.float64, torch.bfloat16], ids=str)
def test_adapters_train_and_resume_on_three_ranks_and_one_as_in_one_process(
    base: torch.dtype, kind: str, tmp_path: Path
) -> None:
    exact = base == torch.float64
    dtypes = (base, torch.float64 if exact else torch.float32)
    # With a base of bfloat16, sums in another order may round an output of the base differently.
    close = {"rtol": 0.0, "atol": 1e-12 if exact else 1e-4}
    (expected,) = ec.run(trained, 1, args=("plain", dtypes, range(4), None))
    ranks = ranks_of(kind)
    for state in ec.run(trained, ranks, args=(kind, dtypes, range(4), None)):
        torch.testing.assert_close(state, expected, **close)
    torch.manual_seed(0)
    start = Net(*dtypes).state_dict()
    changed = {name for name, value in start.items() if not torch.equal(value, expected[name])}
    assert changed == {name for name in start if ".base." not in name}

    ec.run(trained, ranks, args=(kind, dtypes, range(2), tmp_path))
    for other, size in (("rows", 3), ("full shard", 3), ("plain", 1), (kind, ranks)):
        for state in ec.run(trained, size, args=(other, dtypes, range(2, 4), tmp_path)):
            torch.testing.assert_close(state, expected, **close)
