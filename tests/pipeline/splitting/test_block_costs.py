"""``ec.pipeline.split(cost="flops")`` of models that make tensors of their own in forward."""

import pytest
import torch
from torch import nn

import echelon as ec

WIDTH = 4


class Masked(nn.Module):
    """Makes a mask, positions and a buffer to write into, all on the CPU whatever its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).masked_fill(torch.ones(WIDTH, dtype=torch.bool), 0.0)
        positions = torch.arange(WIDTH, dtype=torch.float32)
        if positions.sum().item() != 6:  # what it has made itself has values
            raise AssertionError
        y = y + positions
        written = torch.zeros(y.shape)
        written[:, :2] = y[:, :2]
        return torch.where(torch.tensor([True, False, True, False]), y, y * 2) + written


class Wide(nn.Module):
    """Twice the operations of ``Masked``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + torch.zeros(WIDTH)


class Looks(nn.Module):
    """Chooses by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum().item() > 0 else x


def names(stages: list[nn.Module]) -> list[set[str]]:
    return [{key.split(".")[0] for key in stage.state_dict()} for stage in stages]


def test_tensors_that_a_model_makes_for_itself_are_no_obstacle():
    model = nn.Sequential(Masked(), Masked(), Wide())
    example = torch.ones(2, WIDTH)
    stages = ec.pipeline.split(model, 2, cost="flops", example=example)
    assert names(stages) == [{"0", "1"}, {"2"}]
    value = example
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, model(example))


def test_the_memory_of_such_a_model_is_measured_too():
    model = nn.Sequential(*(Masked() for _ in range(4)))
    schedule = ec.pipeline.schedule("1f1b", stages=2, microbatches=2, ranks=2)
    stages = ec.pipeline.split(
        model, 2, cost="parameters", example=torch.ones(2, WIDTH), schedule=schedule, memory_cap=1e9
    )
    assert names(stages) == [{"0", "1"}, {"2", "3"}]


def test_a_layer_that_looks_at_values_is_named():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Looks())
    with pytest.raises(ec.ArgumentError, match=r"^layer 1 .* by shapes alone.* cost='time'"):
        ec.pipeline.split(model, 2, cost="flops", example=torch.ones(2, WIDTH))
