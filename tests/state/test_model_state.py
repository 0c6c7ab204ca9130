"""A state dict is loaded in place by the code of the modules, or not at all."""

from typing import Any

import pytest
import torch
from torch import nn

from echelon.errors import ArgumentError
from echelon.state.model_state import load_model_state, state_of_copies

STATE = {"weight": torch.arange(4.0).view(2, 2), "bias": torch.tensor([5.0, 6.0])}


def test_what_is_loaded_is_written_into_the_memory_that_is_given() -> None:
    layer, memory = nn.Linear(2, 2), torch.zeros(2, 2)
    before = layer.weight.tolist()
    assert load_model_state(layer, {id(layer.weight): memory}, STATE, strict=True) == ([], [])
    assert memory.tolist() == [[0, 1], [2, 3]]
    assert layer.weight.tolist() == before
    assert layer.bias.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": torch.zeros(3)}, r"size mismatch for bias: .*\[3\]"),
        ({"bias": torch.zeros(2, dtype=torch.complex64)}, "would lose what torch.float32"),
        ({"bias": 3}, "expected torch.Tensor .* received <class 'int'>"),
        ({"more": torch.zeros(1)}, "more: unexpected"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(changes: dict[str, Any], message: str) -> None:
    layer = nn.Linear(2, 2)
    before = [param.tolist() for param in layer.parameters()]
    with pytest.raises(ArgumentError, match=message):
        load_model_state(layer, {}, {**STATE, **changes}, strict=True)
    assert [param.tolist() for param in layer.parameters()] == before


def test_an_error_counts_the_names_of_each_kind_and_shows_some_of_each() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(ArgumentError) as info:
        load_model_state(model, {}, state, strict=True)
    text = str(info.value)
    assert "40 missing, 40 unexpected: 0.bias: missing" in text
    assert (text.count(": missing"), text.count(": unexpected")) == (6, 6)
    assert "and 68 more. Names there begin with 'module.'" in text
    assert text.endswith("ModuleDict({'module': model})")


def test_keys_that_do_not_fit_are_reported_where_they_may_be_left_out() -> None:
    layer = nn.Linear(2, 2)
    report = load_model_state(layer, {}, {"more": torch.ones(1)}, strict=False)
    assert report == (["weight", "bias"], ["more"])


def test_a_state_of_copies_shares_no_memory_with_the_model() -> None:
    layer = nn.Linear(2, 2)
    state = state_of_copies(layer, {id(layer.weight): STATE["weight"]})
    assert state["weight"].data_ptr() == STATE["weight"].data_ptr()  # which is a copy already
    assert torch.equal(state["bias"], layer.bias)
    assert state["bias"].data_ptr() != layer.bias.data_ptr()
