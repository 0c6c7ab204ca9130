"""The state of an optimizer by name, from ranges that a rank holds and back into them."""

from typing import Any

import pytest
import torch
from torch import nn

from echelon.errors import ArgumentError
from echelon.state.optimizer_state import (
    gather_optimizer_state,
    load_optimizer_state,
    matches,
)
from echelon.state.sharded_state import ParameterShards
from echelon.state.tensor_shard import TensorShard


def flat_shards(sizes: dict[str, int]) -> tuple[nn.Parameter, ParameterShards]:
    """One flat parameter in the place of 1D ones, and the second half of each on this rank."""
    shards = [
        TensorShard(names=(name,), shape=(size,), start=size // 2, values=torch.zeros(size // 2))
        for name, size in sizes.items()
    ]
    flat = nn.Parameter(torch.cat([shard.values for shard in shards]))
    return flat, ParameterShards(by_param={flat: tuple(shards)})


def by_name(**states: dict[str, Any]) -> dict[str, Any]:
    return {"state": states, "param_groups": [{"lr": 0.5, "params": list(states)}]}


def test_a_flat_parameter_gets_its_ranges_of_whole_states_end_to_end() -> None:
    flat, shards = flat_shards({"a": 4, "b": 6})
    optimizer = torch.optim.SGD([flat], lr=0.1, momentum=0.9)
    one, other = torch.arange(4.0), torch.arange(6.0)
    state = by_name(a={"momentum_buffer": one}, b={"momentum_buffer": other})
    load_optimizer_state(optimizer, shards.by_param, state)
    assert optimizer.state[flat]["momentum_buffer"].tolist() == [2, 3, 3, 4, 5]
    assert optimizer.param_groups[0]["lr"] == 0.5
    found = gather_optimizer_state(optimizer, shards)
    assert found["state"]["a"]["momentum_buffer"].tolist() == [2, 3]
    assert found["state"]["b"]["momentum_buffer"].tolist() == [3, 4, 5]
    assert found["param_groups"][0]["params"] == ["a", "b"]


def test_a_flat_parameter_refuses_two_values_of_one_number() -> None:
    flat, shards = flat_shards({"a": 4, "b": 6})
    optimizer = torch.optim.SGD([flat], lr=0.1)
    state = by_name(a={"step": torch.tensor(1.0)}, b={"step": torch.tensor(2.0)})
    with pytest.raises(ArgumentError, match="they are one flat parameter"):
        load_optimizer_state(optimizer, shards.by_param, state)
    assert not optimizer.state


def test_names_of_other_ranks_are_refused_only_where_all_must_be_here() -> None:
    flat, shards = flat_shards({"a": 4})
    optimizer = torch.optim.SGD([flat], lr=0.1, momentum=0.9)
    state = by_name(a={"momentum_buffer": torch.ones(4)}, b={"momentum_buffer": torch.ones(2)})
    with pytest.raises(ArgumentError, match="b: unexpected"):
        load_optimizer_state(optimizer, shards.by_param, state)
    load_optimizer_state(optimizer, shards.by_param, state, [["a", "b"]])
    assert optimizer.state[flat]["momentum_buffer"].tolist() == [1, 1]


def test_a_state_by_number_is_refused_with_the_call_that_takes_it() -> None:
    flat, shards = flat_shards({"a": 4})
    optimizer = torch.optim.SGD([flat], lr=0.1)
    with pytest.raises(ArgumentError, match=r"by number \(0\).*optimizer\.load_state_dict"):
        load_optimizer_state(optimizer, shards.by_param, optimizer.state_dict())


def test_a_group_without_parameters_gets_the_saved_one_at_its_place() -> None:
    assert matches([{1}, {0}, []], 3) == [1, 0, 2]
    assert matches([{1}, []], 2) == [1, None]  # another group has that
    assert matches([{0}, []], 1) == [0, None]


def test_a_group_gets_the_saved_one_of_the_same_parameters_only() -> None:
    assert matches([{0, 1}], 2) == [None]
    assert matches([{0}, {0}, {1}], 2) == [None, None, 1]
