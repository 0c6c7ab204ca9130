"""A model built as Llama is: RMS norms, rotary positions, grouped heads, gated layers.

Shapes: B sequences, L positions, D width, H heads, K heads of keys, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ONE_BILLION", "TINY", "Block", "Llama", "LlamaConfig"]


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a model and of its batch."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    batch: int
    context: int


ONE_BILLION = LlamaConfig(
    layers=16,
    width=2048,
    heads=32,
    key_heads=8,
    hidden=8192,
    vocabulary=32_000,
    batch=4,
    context=2048,
)
TINY = LlamaConfig(
    layers=2, width=32, heads=4, key_heads=2, hidden=64, vocabulary=128, batch=2, context=16
)


def rotated(x_BHLE: Tensor, angles_LE: Tensor) -> Tensor:
    """Queries or keys at their positions."""
    left, right = x_BHLE.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return x_BHLE * angles_LE.cos().to(x_BHLE.dtype) + turned * angles_LE.sin().to(x_BHLE.dtype)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head = config.width // config.heads
        self.repeat = config.heads // config.key_heads
        keys = config.key_heads * self.head
        self.queries = nn.Linear(config.width, config.width, bias=False)
        self.keys = nn.Linear(config.width, keys, bias=False)
        self.values = nn.Linear(config.width, keys, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BLD: Tensor, angles_LE: Tensor) -> Tensor:
        q, k, v = (
            layer(x_BLD).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        q, k = rotated(q, angles_LE), rotated(k, angles_LE)
        k, v = (part.repeat_interleave(self.repeat, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x_BLD: Tensor, angles_LE: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm1(x_BLD), angles_LE)
        y_BLD = self.norm2(x_BLD)
        return x_BLD + self.down(F.silu(self.gate(y_BLD)) * self.up(y_BLD))


class Llama(nn.Module):
    """Token ids to the loss of the next one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tokens(tokens_BL)
        half = torch.arange(0, self.head_width, 2, device=x_BLD.device, dtype=torch.float32)
        speeds = 10_000.0 ** (-half / self.head_width)
        places = torch.arange(tokens_BL.shape[1], device=x_BLD.device, dtype=torch.float32)
        angles_LE = torch.outer(places, speeds).repeat(1, 2)
        for block in self.blocks:
            x_BLD = block(x_BLD, angles_LE)
        logits = self.head(self.norm(x_BLD)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten())
