"""Models, batches and losses that comparisons are tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def mlp_with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def mlp_with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def token_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))


class Rounding(nn.Module):
    """Computes in a lower precision inside, as norms and attention of many models do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(torch.tanh(hidden.to(self.dtype)).to(hidden.dtype))


class Averaging(nn.Module):
    """Keeps a count of its forwards, by which it scales."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return self.linear(x) / self.count


def rows_of_numbers(size: int = 8, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator))
        for _ in range(steps)
    ]


def rows_of_tokens() -> list[tuple[Tensor, Tensor]]:
    """Tokens, of which other numbers count in each row; -100 is padding."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(3):
        x = torch.randint(11, (8, 6), generator=generator)
        y = torch.randint(11, (8, 6), generator=generator)
        lengths = torch.randint(1, 7, (8, 1), generator=generator)
        batches.append((x, y.masked_fill(torch.arange(6) >= lengths, -100)))
    return batches


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the tokens that count."""
    return cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def ten_rows() -> list[tuple[Tensor, Tensor]]:
    return rows_of_numbers(10)


def sixteen_rows() -> list[tuple[Tensor, Tensor]]:
    return rows_of_numbers(16)
