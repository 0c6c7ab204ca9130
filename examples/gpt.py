"""A small GPT over bytes: pre-norm blocks, causal attention, the embedding also as the head.

Shapes: B sequences, L positions, D width, H heads, V = 256 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    layers: int = 3
    width: int = 256
    heads: int = 4
    context: int = 64

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.context) < 1 or self.width % self.heads:
            raise ValueError(f"{self}: all must be positive, and width a multiple of heads")


def flops_per_token(config: GPTConfig, num_parameters: int) -> float:
    """The operations of a training step for each token: of the matrices, and of attention.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    """
    return 6.0 * num_parameters + 12.0 * config.layers * config.width * config.context


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        query, key, value = self.qkv(x_BLD).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(  # over positions, so heads go before them
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm1(x_BLD))
        return x_BLD + self.down(F.gelu(self.up(self.norm2(x_BLD)), approximate="tanh"))


def embed(tokens: nn.Embedding, positions: nn.Embedding, tokens_BL: Tensor) -> Tensor:
    """What goes into the first block, BLD."""
    positions_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    return tokens(tokens_BL) + positions(positions_L)


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Each block adds to the stream twice; its last layers start smaller by so much.
                last = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * config.layers) if last else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = embed(self.tokens, self.positions, tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return F.linear(self.norm(x_BLD), self.tokens.weight)  # B L V

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, seed: int, temperature: float = 0.8) -> bytes:
        """``prompt`` and ``length`` bytes that the model drew after it."""
        device = self.tokens.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(length):
            recent_BL = torch.tensor([text[-self.config.context :]], device=device)
            logits_V = self(recent_BL)[0, -1].float().cpu() / temperature
            drawn = torch.multinomial(logits_V.softmax(0), 1, generator=generator)
            text.append(int(drawn.item()))
        return bytes(text)
