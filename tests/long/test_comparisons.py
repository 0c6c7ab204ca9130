"""Comparisons of many loops and models with other data: each mistake is named, and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import echelon as ec
from tests.laboratory.mutants import MUTANTS, Mutant
from tests.laboratory.tasks import Optimizer, adamw, rows_of_tokens, sgd, sixteen_rows, ten_rows

SEEDS = range(3)
SHARDED: dict[str, Any] = {"fsdp": {"min_num_params": 0}}
PLANS = {"dp=2": {}, "dp=6": {}, "shard=3": SHARDED, "dp=2,shard=2": SHARDED}


def numbers(seed: int, *shape: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(*shape, 4, generator=generator),
            torch.randn(shape[0], 1, generator=generator),
        )
        for _ in range(3)
    ]


def batches_of(mutant: Mutant, ranks: int, seed: int) -> list[Any]:
    """Other data of the sizes that the mistake needs."""
    if mutant.batches is rows_of_tokens:
        return rows_of_tokens()
    if mutant.batches is ten_rows:
        return numbers(seed, 2 * ranks + 2)  # which ranks cannot share evenly
    return numbers(seed, (8 if mutant.batches is sixteen_rows else 4) * ranks)


def needs_uneven_ranks(mutant: Mutant) -> bool:
    return mutant.batches in (ten_rows, rows_of_tokens)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.train.__name__)
def test_each_mistake_is_named_with_other_data_ranks_and_optimizers(
    mutant: Mutant, ranks: int, optimizer: Optimizer
) -> None:
    if needs_uneven_ranks(mutant) and ranks != 4:
        pytest.skip("this loop's mistake needs 4 ranks")
    for seed in SEEDS:
        batches = batches_of(mutant, ranks, seed)
        other = replace(mutant, batches=lambda batches=batches: batches, optimizer=optimizer)
        causes = other.compare(ranks=ranks).causes
        assert [cause.kind for cause in causes[:1]] == [mutant.cause]


class Model(nn.Module):
    """Takes (row, 5, 4) and gives a number for each row."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return self.head((hidden[0] if isinstance(hidden, tuple) else hidden).mean(1))


class Experts(nn.Module):
    """Sends each token to one of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.router(tokens).softmax(-1)
        output = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            chosen = (weights.argmax(-1) == i).nonzero()[:, 0]
            output = output.index_add(
                0, chosen, expert(tokens[chosen]) * weights[chosen, i : i + 1]
            )
        return output.view_as(x)


class TimeFirst(nn.Module):
    """Has rows in dim 1 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.transpose(0, 1))
        return output.transpose(0, 1)


class Repeated(nn.Module):
    """Calls one module three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


INNER: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 4, 2, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.GroupNorm(5, 5)),
    "dropout": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
    "experts": Experts,
    "time first": TimeFirst,
    "repeated": Repeated,
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", INNER)
def test_models_of_many_kinds_give_no_alarm(name: str, plan: str) -> None:
    for seed in SEEDS:
        result = ec.compare(
            lambda: Model(INNER[name](), 4),
            numbers(seed, 12, 5),
            ec.Plan.parse(plan, **PLANS[plan]),
            loss_fn=mse_loss,
            optimizer=adamw if seed % 2 else sgd,
            clip=1.0 if seed % 2 else None,
        )
        assert result.same, str(result)
