"""What one process gets: the training that a test of ranks compares its weights with."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    losses: Callable[[int], Iterable[Tensor]],
) -> dict[str, Tensor]:
    """Train in this process and return the weights.

    Args:
        losses: of a step: those whose gradients it adds up. A generator computes each of them
            after the backward of the one before.
    """
    for step in range(num_steps):
        for loss in losses(step):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
