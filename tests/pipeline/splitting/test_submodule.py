"""A stage has the state and the names of its part of the model, and runs it."""

from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn

from echelon.errors import ArgumentError
from echelon.pipeline.splitting.split import split
from echelon.pipeline.splitting.submodule import state_names
from tests.pipeline.split_models import LENGTH, VOCABULARY, Decoder, Layered


@pytest.mark.parametrize("make", [Decoder, Layered])
def test_states_of_stages_are_the_state_of_the_model_and_move_with_it(make) -> None:
    model = make()
    stages = split(model, 3)
    names = [set(stage.state_dict()) for stage in stages]
    assert set().union(*names) == set(model.state_dict())
    assert all(state_names(stage) == own for stage, own in zip(stages, names, strict=True))
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
            assert {module.training for module in stage.__dict__["_stage_body"].modules()} == {mode}


def doubled(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return 2 * type(model).forward(model, tokens)


def test_a_forward_that_was_set_on_the_model_runs_the_part_of_each_stage() -> None:
    model = Decoder()
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    plain = model(tokens)
    model.forward = MethodType(doubled, model)
    with pytest.raises(ArgumentError, match="Decoder was replaced on this object by functools"):
        replaced = Decoder()
        replaced.forward = partial(doubled, replaced)
        split(replaced, 2)
    ran: list[int] = []
    for index, block in enumerate(model.inner["blocks"]):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
    value: torch.Tensor = tokens
    for stage in split(model, 2):
        value = stage(value)
    assert ran == list(
        range(len(model.inner["blocks"]))
    )  # each stage runs its own blocks, and no others
    assert torch.equal(value, 2 * plain)


def test_a_model_that_is_compiled_as_a_whole_is_refused() -> None:
    model = Decoder()
    model.compile(backend="eager")
    with pytest.raises(ArgumentError, match="Decoder is compiled as a whole and cannot"):
        split(model, 2)


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


def test_modules_of_the_model_may_have_any_name() -> None:
    """Also those that a stage could have for itself."""
    names = ["body", "names", "modules_", "containers", "stages", "module", "inner", "placement"]
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(2, 2))
    for stage, expected in zip(split(model, len(names)), names, strict=True):
        assert [*stage.state_dict()] == [f"{expected}.weight", f"{expected}.bias"]
