"""Parameters that share memory are tied or refused, before a wrapper parts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.modules.memory_overlap import check_memory_of
from tests.reference import assert_states_close, mse, rows, train_on


class Pair(nn.Module):
    """Two layers, the second of which may share the memory of the first in some way."""

    def __init__(self, share: Callable[[Pair], None] = lambda pair: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        share(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def by_data(pair: Pair) -> None:
    pair.second.weight.data = pair.first.weight.data


def by_new_parameter(pair: Pair) -> None:
    pair.second.bias = nn.Parameter(pair.first.weight.data[2])


def transposed(pair: Pair) -> None:
    pair.second.weight = nn.Parameter(pair.first.weight.data.t())


def as_column(pair: Pair) -> None:
    pair.second.bias = nn.Parameter(pair.first.weight.data[:, 1])


def as_buffer(pair: Pair) -> None:
    pair.register_buffer("row", pair.first.weight.data[0])


def as_bytes(pair: Pair) -> None:
    pair.register_buffer("bits", pair.first.bias.data.view(torch.int32))


def as_view_in_a_graph(pair: Pair) -> None:
    pair.second.other = pair.first.weight.t()


def same_parameter(pair: Pair) -> None:
    pair.second.weight = pair.first.weight


def other_columns(pair: Pair) -> None:
    both = torch.rand(4, 2, dtype=torch.float64)
    pair.first.bias, pair.second.bias = (nn.Parameter(both[:, i]) for i in range(2))


def end_to_end(pair: Pair) -> None:
    both = torch.rand(8, dtype=torch.float64)
    pair.first.bias, pair.second.bias = (nn.Parameter(half) for half in both.split(4))


def without_elements(pair: Pair) -> None:
    pair.nothing = nn.Parameter(pair.first.weight.data[:0])


def as_value_without_graph(pair: Pair) -> None:
    pair.first.original = pair.first.weight.data  # as torch.nn.utils.spectral_norm does


SHARED = (by_data, by_new_parameter, transposed, as_column, as_buffer, as_bytes, as_view_in_a_graph)
SEPARATE = (same_parameter, other_columns, end_to_end, without_elements, as_value_without_graph)


@pytest.mark.parametrize("share", SHARED, ids=lambda share: share.__name__)
def test_what_shares_an_element_with_a_parameter_is_named_with_it(share) -> None:
    with pytest.raises(ec.ArgumentError, match=r"parameter '.*' have memory in common"):
        check_memory_of(Pair(share), (), "FSDP")


@pytest.mark.parametrize("share", SEPARATE, ids=lambda share: share.__name__)
def test_what_has_its_own_elements_may_lie_between_those_of_others(share) -> None:
    check_memory_of(Pair(share), (), "FSDP")


def test_parameters_that_stay_where_they_are_may_share_memory() -> None:
    pair = Pair(by_data)
    check_memory_of(pair, [pair.first.weight, pair.second.weight], "FSDP")
    with pytest.raises(ec.ArgumentError, match="have memory in common"):
        check_memory_of(pair, [pair.first.weight], "FSDP")


def refuses_to_part(world: ec.World) -> None:
    for share in SHARED:
        with pytest.raises(ec.ArgumentError, match="FSDP gives parameters other memory"):
            ec.FSDP(Pair(share), world.group)
    for share in SHARED[:-1]:  # an attribute stays in its stage
        pair = Pair(share)
        if share is as_buffer:
            pair.second.register_buffer("row", pair.row)
        if share is as_bytes:
            pair.second.register_buffer("bits", pair.bits)
        stages = [pair.first, pair.second]
        with pytest.raises(ec.ArgumentError, match="Stages have parameters"):
            ec.Pipeline(stages, world.group, microbatches=2, loss_fn=mse)
        with pytest.raises(ec.ArgumentError, match="Stages have parameters"):
            ec.parallelize(stages, ec.Plan(pp=2, microbatches=2), world, loss_fn=mse)


def test_sharded_models_and_stages_refuse_what_they_would_part() -> None:
    ec.run(refuses_to_part, 2)


def trains_shared_memory(world: ec.World) -> None:
    for share in (by_data, by_new_parameter, as_column):
        states = []
        for ranks in ([world.rank], range(world.size)):
            model = Pair(share) if len(ranks) > 1 else ec.DDP(Pair(share), world.group)

            def loss_of(step: int, rank: int, model: nn.Module = model) -> Tensor:
                return mse(model(rows(rank, 3, 4, step=step)), torch.ones(1).double())

            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            states.append(train_on(ranks, model, optimizer, 3, loss_of))
        assert_states_close(*states, rtol=1e-12, atol=1e-12)


def test_replicas_share_the_memory_that_the_plain_model_shares() -> None:
    ec.run(trains_shared_memory, 2)
