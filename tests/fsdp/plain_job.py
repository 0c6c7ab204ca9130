"""A job of a user on one rank, or on one process, whose lines are tried under every wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec


class Scale(nn.Module):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class Model(nn.Module):
    """With an odd number of rows, and a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 6))
        self.scaling = Scale()
        self.head = nn.Linear(6, 11)

    @property
    def scale(self) -> nn.Parameter:
        return self.scaling.factor

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.embed, self.body, self.scaling, self.head]

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.scaling(self.body(self.embed(ids))))


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


def ids(rank: int, step: int = 0) -> Tensor:
    return torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(100 * step + rank))


class Job:
    """A model on one rank of some, or on one process that has the rows of all."""

    def __init__(
        self, model: nn.Module, inner: Model, ranks: list[int], group: ec.Group | None = None
    ) -> None:
        self.model, self.inner, self.ranks, self._group = model, inner, ranks, group
        self.params = [*model.parameters()]

    def loss(self, step: int = 0) -> Tensor:
        x = torch.cat([ids(rank, step) for rank in self.ranks])
        return F.cross_entropy(self.model(x).flatten(0, 1), x.flatten())

    def evaluate(self, step: int = 0) -> Tensor:
        """The loss of the rows of all ranks."""
        with torch.no_grad():
            loss = self.loss(step)
        if self._group is not None:
            self._group.all_reduce(loss, "mean")
        return loss

    def backward(self, step: int = 0) -> None:
        self.loss(step).backward()

    def train(self, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            self.backward(step)
            optimizer.step()

    def sgd(self, params: Any = None) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.params if params is None else params, lr=0.1, momentum=0.9)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """That of ``Job.loss``, of a microbatch."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class PipelineJob(Job):
    """The same under a pipeline, whose ``step`` runs backward itself."""

    model: ec.Pipeline

    def loss(self, step: int = 0) -> Tensor:
        """That of a step, which has run backward already."""
        x = self._ids(step)
        call = self.model.step if torch.is_grad_enabled() else self.model.eval_step
        loss = call(x, target=x, loss_everywhere=True)
        assert loss is not None
        return loss

    def backward(self, step: int = 0) -> None:
        self.model.step(self._ids(step), target=self._ids(step))

    def _ids(self, step: int) -> Tensor:
        return torch.cat([ids(rank, step) for rank in self.ranks])


Lines = Callable[[Job], Any]
LINES: dict[str, Lines] = {}
REFUSED: dict[str, Lines] = {}  # right, or a typed error, on every sharded model


def right(function: Lines) -> Lines:
    LINES[function.__name__] = function
    return function


def refused(function: Lines) -> Lines:
    REFUSED[function.__name__] = function
    return function
