"""AdamW, and its learning rate over the steps."""

from __future__ import annotations

import argparse
import math

from torch import nn
from torch.optim import AdamW


def matrices(model: nn.Module) -> set[nn.Parameter]:
    """The parameters whose weights decay: not biases and norms.

    Ask before the model is wrapped: that keeps its parameters, and may change their shapes.
    """
    return {parameter for parameter in model.parameters() if parameter.dim() > 1}


def make_optimizer(
    model: nn.Module, decaying: set[nn.Parameter], args: argparse.Namespace
) -> AdamW:
    """AdamW over the parameters that this rank trains: in a pipeline, those of its stages."""
    trained = list(model.parameters())
    groups = [
        {"params": [one for one in trained if one in decaying], "weight_decay": 0.1},
        {"params": [one for one in trained if one not in decaying], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A short linear warm-up, then half a cosine down to a twentieth."""
    warmup = max(1, min(50, args.steps // 10))
    if step < warmup:
        return float(args.lr * (step + 1) / warmup)
    done = (step - warmup) / (args.steps - warmup)
    return float(args.lr * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2))
