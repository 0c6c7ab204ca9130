"""A state dict is loaded into this rank's ranges in place, or not at all."""

from typing import Any

import pytest
import torch
from torch import nn

from echelon.errors import ArgumentError
from echelon.state.model_state import load_model_state, state_of_copies
from echelon.state.sharded_state import ParameterShards
from echelon.state.tensor_shard import TensorShard


def half_of(layer: nn.Linear) -> ParameterShards:
    """The second row of the weight, in memory of its own, on a rank that has no more of it."""
    values = torch.zeros(2)
    shard = TensorShard(
        names=("weight",), shape=(2, 2), start=2, values=values, tensor=layer.weight
    )
    return ParameterShards(by_param={layer.weight: (shard,)})


def values_in(shards: ParameterShards) -> list[float]:
    return [value for (shard,) in shards.by_param.values() for value in shard.values.tolist()]


STATE = {"weight": torch.arange(4.0).view(2, 2), "bias": torch.tensor([5.0, 6.0])}


def test_a_rank_takes_its_range_of_a_full_tensor() -> None:
    layer = nn.Linear(2, 2)
    shards = half_of(layer)
    assert load_model_state(layer, shards, STATE, strict=True) == ([], [])
    assert values_in(shards) == [2, 3]
    assert layer.bias.tolist() == [5, 6]
    parts = {"weight": torch.tensor([8.0, 9.0]), "bias": STATE["bias"]}
    load_model_state(layer, shards, parts, strict=True, parts=True)
    assert values_in(shards) == [8, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": torch.zeros(3)}, r"bias: \(3,\) instead of \(2,\)"),
        ({"bias": torch.zeros(2, dtype=torch.complex64)}, "would lose what torch.float32"),
        ({"bias": 3}, "bias: a int instead of a tensor"),
        ({"more": torch.zeros(1)}, "more: unexpected"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(changes: dict[str, Any], message: str) -> None:
    layer = nn.Linear(2, 2)
    shards, before = half_of(layer), layer.bias.detach().clone()
    with pytest.raises(ArgumentError, match=message):
        load_model_state(layer, shards, {**STATE, **changes}, strict=True)
    assert values_in(shards) == [0, 0]
    assert torch.equal(layer.bias, before)


def test_an_error_counts_the_names_of_each_kind_and_shows_some_of_each() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(ArgumentError) as info:
        load_model_state(model, ParameterShards(by_param={}), state, strict=True)
    text = str(info.value)
    assert "40 missing, 40 unexpected: 0.bias: missing" in text
    assert (text.count(": missing"), text.count(": unexpected")) == (6, 6)
    assert "and 68 more. Names there begin with 'module.'" in text
    assert text.endswith("ModuleDict({'module': model})")


def test_keys_that_do_not_fit_are_reported_where_they_may_be_left_out() -> None:
    layer = nn.Linear(2, 2)
    report = load_model_state(layer, half_of(layer), {"more": torch.ones(1)}, strict=False)
    assert report == (["weight", "bias"], ["more"])


def test_a_state_of_copies_shares_no_memory_with_the_model() -> None:
    layer = nn.Linear(2, 2)
    state = state_of_copies(layer, {id(layer.weight): STATE["weight"]})
    assert state["weight"].data_ptr() == STATE["weight"].data_ptr()  # which is a copy already
    assert torch.equal(state["bias"], layer.bias)
    assert state["bias"].data_ptr() != layer.bias.data_ptr()
