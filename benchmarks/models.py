"""Models for benchmarks, each with a loss and with batches that differ between ranks.

Shapes: B sequences, L positions, D width, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "GPT",
    "UNITS",
    "GPTConfig",
    "Task",
    "gpt_task",
    "many_small_task",
    "tiny_task",
    "token_loss",
]

NUM_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to train.

    Attributes:
        name: in tables.
        build: makes the model; the same weights each time.
        batches: inputs and targets of this rank, used in turn.
        loss: a function of outputs and targets.
        num_units: number of units, if the task measures the cost of a unit; else None.
    """

    name: str
    build: Callable[[], nn.Module]
    batches: list[tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    num_units: int | None = None


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A GPT of 33.7 M parameters, by default."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192
    context: int = 128


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (
            part.transpose(1, 2)  # heads before positions
            for part in self.qkv(x_BLD).unflatten(-1, (3, self.heads, -1)).unbind(2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm1(x_BLD))
        return x_BLD + self.down(F.gelu(self.up(self.norm2(x_BLD)), approximate="tanh"))


class GPT(nn.Module):
    """Token ids to logits; pre-norm, learned positions, a head of its own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tokens(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))


class TinyBlock(nn.Sequential):
    """Six parameters with almost no work."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(3)))


UNITS: tuple[type[nn.Module], ...] = (Block, TinyBlock)


def gpt_task(rank: int, config: GPTConfig, batch: int = 2) -> Task:
    """The GPT on random tokens, to be predicted from themselves."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (batch, config.context)
    batches = []
    for _ in range(NUM_BATCHES):
        tokens = torch.randint(config.vocabulary, shape, generator=generator)
        batches.append((tokens, tokens.roll(-1, dims=1)))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(config)

    return Task(name="GPT", build=build, batches=batches, loss=token_loss)


def token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """The mean cross entropy of all positions."""
    return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())


def many_small_task(rank: int, layers: int = 200, width: int = 64, batch: int = 8) -> Task:
    """Many layers with little work in each, so that the cost of a parameter dominates."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(*parts)

    return Task(name="many small", build=build, batches=_noise(rank, batch, width), loss=F.mse_loss)


def tiny_task(rank: int, blocks: int = 16) -> Task:
    """Blocks with so little work that the cost of a unit dominates."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(TinyBlock() for _ in range(blocks)))

    batches = _noise(rank, batch=4, width=8)
    return Task(name="tiny", build=build, batches=batches, loss=F.mse_loss, num_units=blocks)


def _noise(rank: int, batch: int, width: int) -> list[tuple[Tensor, Tensor]]:
    """Random inputs and targets of one rank."""
    generator = torch.Generator().manual_seed(2000 + rank)
    shape = (batch, width)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(NUM_BATCHES)
    ]
