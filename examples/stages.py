"""The GPT in stages, for a pipeline: ``split`` cuts it between its blocks."""

from __future__ import annotations

from gpt import GPT
from torch import nn

import echelon as ec


def cut(model: GPT, num_stages: int) -> list[nn.Module]:
    """Cut the model into stages with nearly equal numbers of blocks; names stay the same."""
    return ec.pipeline.split(
        model,
        num_stages,
        cost=[1.0] * len(model.blocks),
        prefix=["tokens", "positions"],  # run before the blocks
        suffix=["norm", "tokens"],  # run after the blocks; the embedding is also the head
    )
