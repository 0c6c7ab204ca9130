"""A stage has the state and the names of its part of the model, and runs it."""

import pytest
import torch
from torch import nn

from echelon.errors import ArgumentError
from echelon.pipeline.splitting.split import split
from tests.pipeline.split_models import LENGTH, VOCABULARY, Decoder, Layered


@pytest.mark.parametrize("make", [Decoder, Layered])
def test_states_of_stages_are_the_state_of_the_model_and_move_with_it(make) -> None:
    model = make()
    stages = split(model, 3)
    names = [set(stage.state_dict()) for stage in stages]
    assert set().union(*names) == set(model.state_dict())
    assert all(stage.names == own for stage, own in zip(stages, names, strict=True))
    for stage in stages:
        stage.to(torch.float64)
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    model.double()
    value = tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, model(tokens))


def test_the_mode_of_a_stage_is_that_of_all_that_it_runs() -> None:
    for stage in split(Decoder(), 2):
        for mode in (False, True):
            stage.train(mode)
            assert {module.training for module in stage.__dict__["body"].modules()} == {mode}


class Foreign(nn.Module):
    def pipeline_layers(self) -> list[nn.Module]:
        return [nn.Linear(2, 2)]


class NoLayers(nn.Module):
    def pipeline_layers(self) -> list[object]:
        return ["linear"]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Foreign(), "its state would have no name"),
        (NoLayers(), "layer 0 of the model is 'linear', not a nn.Module"),
    ],
)
def test_layers_that_are_not_of_the_model_are_refused(model: nn.Module, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        split(model, 1)
