"""Models whose units have what makes sharding hard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon import Strategy
from tests import reference

VOCABULARY, WIDTH, LENGTH = 11, 6, 5
# Hybrid strategies need a mesh: see test_hybrid.
PLAIN = [strategy for strategy in Strategy if not strategy.hybrid]


def has_effect(strategy: Strategy, layout: str = "flat", least: int = 0) -> bool:
    """Whether there is something to lay out, or to leave whole; otherwise FSDP refuses."""
    return strategy is not Strategy.NO_SHARD or (layout, least) == ("flat", 0)


class Block(nn.Module):
    """Norm, a layer with a bias that no number of ranks divides, a scalar, a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Tied embeddings, a frozen layer, blocks, one of them used twice, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, hidden) for hidden in (7, 8, 3))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.shift
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(self.frozen(x))


def build(dtype: torch.dtype = torch.float64, seed: int = 0) -> Tiny:
    """The same weights each time."""
    torch.manual_seed(seed)
    return Tiny().to(dtype)


def batch(step: int, rank: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@cache
def train_plain(size: int, steps: int, *, clip: float | None = None) -> tuple[dict, list[float]]:
    """One process on the batches of ``size`` ranks together."""
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def losses(step: int) -> Iterator[Tensor]:
        parts = [batch(step, rank) for rank in range(size)]
        yield loss_of(model, *(torch.cat(column) for column in zip(*parts, strict=True)))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    totals = reference.train(optimizer, steps, losses)
    return model.state_dict(), totals
