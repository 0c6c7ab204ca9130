"""The GPT in stages, for a pipeline: the same modules, so the same parameters.

Shapes: B sequences, L positions, D width, V = 256 bytes.
"""

from __future__ import annotations

import torch.nn.functional as F
from gpt import GPT, embed
from torch import Tensor, nn

import echelon as ec


class Stage(nn.Module):
    """Some blocks of a GPT, with its embeddings if they are the first, its head if the last."""

    def __init__(self, model: GPT, blocks: range) -> None:
        super().__init__()
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == len(model.blocks)
        self.blocks = nn.ModuleList(model.blocks[i] for i in blocks)
        if self.is_first:
            self.positions = model.positions
        if self.is_first or self.is_last:
            self.tokens = model.tokens  # also the head; the pipeline adds up its gradients
        if self.is_last:
            self.norm = model.norm

    def forward(self, x: Tensor) -> Tensor:
        """From tokens_BL, or x_BLD, to x_BLD, or logits_BLV."""
        if self.is_first:
            x = embed(self.tokens, self.positions, x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight) if self.is_last else x


def cut(model: GPT, num_stages: int) -> list[Stage]:
    """The model in stages with nearly as many blocks each."""
    costs = [1.0] * len(model.blocks)
    if num_stages > len(costs):
        raise ec.ArgumentError(
            f"{len(costs)} blocks cannot be cut into {num_stages} stages: give more --layers, or "
            "fewer ranks or --chunks"
        )
    return [Stage(model, blocks) for blocks in ec.pipeline.partition(costs, num_stages)]
