"""Batches of a rank, and the training on one process that tests of ranks compare with."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

__all__ = [
    "assert_states_close",
    "assert_states_equal",
    "mse",
    "rows",
    "train",
    "train_alone",
    "train_on",
]

Losses = Callable[[int], Iterable[Tensor]]


def rows(rank: int, *shape: int, step: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random values, which differ by rank and by step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """The mean over rows and columns."""
    return (output - target).square().mean()


def train(optimizer: torch.optim.Optimizer, num_steps: int, losses: Losses) -> list[float]:
    """Train a model on one process or on a rank, and return the loss of each step.

    Args:
        losses: of a step: those whose gradients it adds up. A generator computes each of them
            after the backward of the one before, and may clip gradients after the last.
    """
    totals = []
    for step in range(num_steps):
        total = 0.0
        for loss in losses(step):
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        totals.append(total)
    return totals


def train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, losses: Losses
) -> dict[str, Tensor]:
    """Train on one process and return the weights."""
    train(optimizer, num_steps, losses)
    return model.state_dict()


def train_on(
    ranks: Collection[int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    loss_of: Callable[[int, int], Tensor],
) -> dict[str, Tensor]:
    """Train on the batches of ``ranks`` and return the weights.

    Args:
        ranks: the rank itself where the model is distributed, and all of them on one process.
        loss_of: the loss of a step and a rank.
    """

    def losses(step: int) -> Iterator[Tensor]:
        for rank in ranks:
            yield loss_of(step, rank) / len(ranks)

    return train_alone(model, optimizer, num_steps, losses)


def assert_states_equal(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare two states by name, bit by bit."""
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name


def assert_states_close(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], **tolerance: float
) -> None:
    """Compare two states by name, up to ``rtol`` and ``atol`` or torch's own tolerance."""
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
