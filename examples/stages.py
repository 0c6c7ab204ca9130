"""The GPT in stages, for a pipeline: ``split`` cuts it between its blocks."""

from __future__ import annotations

from gpt import GPT
from torch import nn

import echelon as ec


def cut(model: GPT, num_stages: int) -> list[nn.Module]:
    """The model in stages with nearly as many blocks each; they keep its modules and names."""
    return ec.pipeline.split(
        model,
        num_stages,
        cost=[1.0] * len(model.blocks),
        prefix=["tokens", "positions"],  # what runs before the blocks
        suffix=["norm", "tokens"],  # after them; the embedding is also the head
    )
