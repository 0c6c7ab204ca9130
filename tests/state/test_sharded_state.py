"""What a rank holds of any module: its own tensors, and what modules with shards describe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import StateError
from echelon.state.sharded_state import ShardedState
from echelon.state.tensor_shard import Replication
from tests.ddp.models import TiedLanguageModel
from tests.holding import check_params, filled, holdings_of, joined, shared_group, write
from tests.reference import assert_states_equal
from tests.worlds import KINDS, run_world


def names_of(holdings: ShardedState) -> list[tuple[str, ...]]:
    return [one.names for one in holdings.tensors]


class Counting(nn.Linear):
    """Has something in its state that is no tensor, a buffer that is not in it, and one that is."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("count", torch.tensor(3))

    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


# --- plain modules -------------------------------------------------------------------------------


def test_a_plain_module_is_held_as_its_state_dict_shows_it() -> None:
    model = nn.Sequential(TiedLanguageModel(), Counting(), nn.BatchNorm1d(3))
    holdings = holdings_of(model, None)
    state = model.state_dict()
    assert [one.name for one in holdings.extras] == ["1._extra_state"]
    assert holdings.extras[0].module is model[1]
    del state["1._extra_state"]
    assert [name for names in names_of(holdings) for name in names[:1]] == [
        name for name in state if name != "0.head.weight"
    ]
    assert ("0.embedding.weight", "0.head.weight") in names_of(holdings)
    for one in holdings.tensors:
        assert torch.equal(one.values, state[one.name])
        assert (one.shape, one.start, one.is_whole) == (state[one.name].shape, 0, True)
        assert (one.copy, one.num_copies) == (0, 1)
        assert not one.values.requires_grad
    assert list(holdings.params) == list(model.parameters())
    check_params(holdings)
    assert holdings.axes == ()


def test_values_that_are_written_are_those_of_the_module() -> None:
    model = nn.Sequential(TiedLanguageModel(), nn.BatchNorm1d(3))
    weights = filled(copy.deepcopy(model), 7).state_dict()
    write(holdings_of(model, None), weights)
    assert_states_equal(model.state_dict(), weights)


def test_a_module_in_two_places_is_held_once_with_both_names() -> None:
    one = Counting()
    holdings = holdings_of(nn.ModuleDict({"a": one, "b": nn.Sequential(one)}), None)
    assert names_of(holdings) == [
        (f"a.{name}", f"b.0.{name}") for name in ("weight", "bias", "count")
    ]
    assert [extra.name for extra in holdings.extras] == ["a._extra_state"]


def test_what_compile_puts_into_names_is_left_out_and_nothing_else() -> None:
    plain = nn.ModuleDict({"my_orig_mod": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1)})
    expected = names_of(holdings_of(plain, None))
    plain["b"] = torch.compile(plain["b"], backend="eager")
    compiled = torch.compile(plain, backend="eager")
    assert names_of(holdings_of(compiled, None)) == expected
    assert expected[0] == ("my_orig_mod.weight",)


def test_ranks_have_copies_that_nobody_keeps_alike() -> None:
    def main(world: World) -> None:
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(world.rank)
        holdings = holdings_of(model, world.group)
        assert [(one.copy, one.replication) for one in holdings.tensors] == [
            (world.rank, Replication.PER_RANK)
        ]
        assert torch.equal(joined(holdings, world.group)["weight"], torch.zeros(1, 2))

    run_world("threads", main, 3)


# --- holders in modules --------------------------------------------------------------------------


def modules_with_holders_in_them(world: World) -> None:
    """Each says its own, under the names of the whole."""
    torch.manual_seed(0)
    plain = nn.ModuleDict(
        {
            "trunk": nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 4)),
            "norm": nn.BatchNorm1d(4),
            "head": TiedLanguageModel(),
            "alone": Counting(),
        }
    )
    expected = {name: one for name, one in plain.state_dict().items() if isinstance(one, Tensor)}
    model = nn.ModuleDict(dict(plain.items()))
    model["trunk"] = torch.compile(
        ec.FSDP(plain["trunk"], world.group, min_num_params=0), backend="eager"
    )
    model["head"] = ec.DDP(plain["head"], world.group)
    group = shared_group([model])
    assert group is world.group
    holdings = holdings_of(model, group)
    assert_states_equal(joined(holdings, group), expected)
    kept = {one.name: one.replication for one in holdings.tensors}
    assert kept["trunk.0.weight"] is kept["head.scale"] is Replication.IDENTICAL
    assert kept["norm.running_mean"] is kept["alone.weight"] is Replication.PER_RANK
    assert [one.name for one in holdings.extras] == ["alone._extra_state"]
    assert set(holdings.params) == set(model.parameters())
    weights = {name: torch.full_like(one, 2) for name, one in expected.items()}
    write(holdings, weights)
    assert_states_equal(joined(holdings_of(model, group), group), weights)


@pytest.mark.parametrize("kind", KINDS)
def test_holders_inside_of_a_plain_module_say_what_they_hold(kind: str) -> None:
    run_world(kind, modules_with_holders_in_them, 3)


def test_a_tensor_that_a_holder_and_a_plain_module_share_is_as_the_holder_says() -> None:
    def main(world: World) -> None:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        first.register_buffer("both", torch.zeros(1))
        outer = nn.Linear(2, 2, bias=False)
        outer.weight = first.weight
        outer.register_buffer("both", first.both)
        model = nn.ModuleDict({"outer": outer, "inner": ec.DDP(first, world.group)})
        model["again"] = model["inner"]
        model["second"] = second
        held = {one.name: one for one in holdings_of(model, world.group).tensors}
        weight, both = held["outer.weight"], held["outer.both"]
        assert weight.names == ("outer.weight", "inner.weight", "again.weight")
        assert weight.replication is Replication.IDENTICAL
        assert both.names == ("outer.both", "inner.both", "again.both")
        assert both.replication is Replication.PRIMARY
        assert held["inner.bias"].names == ("inner.bias", "again.bias")
        assert held["second.bias"].replication is Replication.PER_RANK
        assert joined(holdings_of(model, world.group), world.group).keys() == (
            {f"{a}.{b}" for a in ("inner", "again") for b in ("weight", "bias", "both")}
            | {"outer.weight", "outer.both", "second.weight", "second.bias"}
        )

    run_world("threads", main, 2)


def test_a_method_called_holdings_does_not_make_a_holder() -> None:
    class Fund(nn.Linear):
        def holdings(self) -> str:
            return "shares"

    assert names_of(holdings_of(nn.Sequential(Fund(1, 1)), None)) == [("0.weight",), ("0.bias",)]


def test_holders_are_asked_outside_of_a_step() -> None:
    def main(world: World) -> None:
        model = nn.Sequential(ec.FSDP(nn.Linear(2, 2), world.group))
        with model[0].full_parameters(), pytest.raises(StateError, match="full_parameters"):
            holdings_of(model, world.group)
        assert shared_group([model]) is world.group

    run_world("threads", main, 2)
