"""A model with its optimizer, whose steps benchmarks time, count and compare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from peers import Peers
from torch import Tensor, nn
from traffic import Traffic

__all__ = ["Trainee", "compare_weights"]


class Trainee(ABC):
    """One model with its optimizer. Abstract: a subclass says what forward and backward are.

    Attributes:
        name: of the variant.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        self.num_steps = 0

    @abstractmethod
    def gradients(self) -> None:
        """Run forward and backward of one batch."""

    def step(self) -> None:
        """Take one step of an ordinary training loop."""
        self.gradients()
        self.optimizer.step()
        self.num_steps += 1

    def traffic(self, peers: Peers) -> tuple[int, int]:
        """Calls and bytes of the third step; the first two set up what stays."""
        self.step()
        self.step()
        with Traffic(peers.rank, peers.size) as traffic:
            self.step()
        return traffic.calls, traffic.nbytes


def compare_weights(
    ours: Trainee,
    theirs: Trainee,
    our_weights: Mapping[str, Tensor],
    their_weights: Mapping[str, Tensor],
) -> dict[str, float]:
    """How far the weights of two variants are apart after the same steps; fails if far."""
    assert ours.num_steps == theirs.num_steps
    difference = largest = 0.0
    for name, weight in our_weights.items():
        expected = their_weights[name]
        difference = max(difference, (weight - expected).abs().max().item())
        largest = max(largest, expected.abs().max().item())
    if not difference <= 1e-3 * largest:
        raise AssertionError(
            f"after {ours.num_steps} steps the weights of {ours.name} and {theirs.name} differ by "
            f"{difference:.3g}, of {largest:.3g}"
        )
    return {"steps": ours.num_steps, "largest_difference": difference, "largest_weight": largest}
