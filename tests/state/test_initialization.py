"""A module on the meta device gets the values that its name and the seed determine."""

import pytest
import torch
from torch import nn

from echelon.errors import ArgumentError
from echelon.state.initialization import Initializer, ParameterPlace, own_tensors

CPU = torch.device("cpu")


def initializer_of(model: nn.Module) -> Initializer:
    places = {
        id(tensor): ParameterPlace(f"{name}.{local}", name, module, tuple(tensor.shape))
        for name, module in model.named_modules()
        for local, tensor in own_tensors(module)
    }
    return Initializer(places, CPU, None)


def weight_of(name: str, seed: int) -> torch.Tensor:
    with torch.device("meta"):
        layer = nn.Linear(3, 2)
    same = layer.weight
    initializer_of(layer).make(name, layer, set(map(id, layer.parameters())), seed)
    assert layer.weight is same
    return layer.weight.detach()


def test_values_depend_on_the_name_and_the_seed_alone() -> None:
    first = weight_of("a", 1)
    torch.manual_seed(99)
    assert torch.equal(weight_of("a", 1), first)
    assert not torch.equal(weight_of("b", 1), first)
    assert not torch.equal(weight_of("a", 2), first)


class Greedy(nn.Linear):
    """Writes also into the layer and the buffer below it, or replaces its own weight."""

    replaces = False

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.replaces:
            self.weight = nn.Parameter(torch.ones(2, 2))
        elif hasattr(self, "below"):
            nn.init.zeros_(self.below.weight)
            self.below.running_mean.fill_(7)


def test_a_module_writes_to_no_tensor_but_those_that_are_selected() -> None:
    model = Greedy(2, 2).to("meta")
    model.below = nn.BatchNorm1d(2)
    before = {name: value.clone() for name, value in model.below.state_dict().items()}
    initializer_of(model).make("", model, {id(model.weight), id(model.bias)}, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.below.state_dict().items())
    assert not model.weight.is_meta


def test_a_module_that_replaces_a_tensor_is_refused() -> None:
    model = Greedy(2, 2).to("meta")
    model.replaces = True
    with pytest.raises(ArgumentError, match=r"put another tensor in the place of 'weight'"):
        initializer_of(model).make("", model, {id(model.weight), id(model.bias)}, 0)


def test_a_module_that_cannot_initialise_is_named() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.empty(1, device="meta"))
    place = ParameterPlace("head.scale", "head", model, (1,))
    with pytest.raises(ArgumentError, match=r"'head' \(Module\) has no reset_parameters"):
        initializer_of(model).check(place)
    Initializer({}, CPU, materialize=lambda module: None).check(place)
