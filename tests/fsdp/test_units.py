"""Rules, and the units that they make of a model."""

import ast
import threading
import time
from typing import Any

import pytest
from torch import nn

import echelon as ec
from echelon.errors import ArgumentError
from echelon.fsdp import units
from echelon.fsdp.units import plan_units
from tests.fsdp.models import Block, build


def names(model: nn.Module, rule: object, ignored: object = ()) -> dict[str, list[str]]:
    """The names of the parameters of each unit."""
    plans = plan_units(model, rule, ignored)
    return {plan.name: [member.name for member in plan.members] for plan in plans}


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))  # 9, 16, 25


def test_one_unit_is_the_whole_model() -> None:
    assert list(names(linears(), ec.units.whole())) == [""]


def test_units_by_class_and_by_name_of_class() -> None:
    for rule in (ec.units.by_type(Block), ec.units.by_type("Block")):
        found = names(build(), rule)
        assert list(found) == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert found["blocks.1"] == [
            "blocks.1.scale",
            "blocks.1.norm.weight",
            "blocks.1.norm.bias",
            "blocks.1.up.weight",
            "blocks.1.up.bias",
            "blocks.1.down.weight",
        ]


def test_units_by_size_count_what_is_not_claimed_below() -> None:
    assert list(names(linears(), ec.units.by_size(16))) == ["", "1", "2"]
    assert list(names(linears(), ec.units.by_size(17))) == ["", "2"]
    assert names(linears(), ec.units.by_size(16))[""] == ["0.weight", "0.bias"]
    # The outer one has 9 left beside the units inside it.
    nested = nn.Sequential(linears())
    assert list(names(nested, ec.units.by_size(9))) == ["", "0.0", "0.1", "0.2"]
    assert list(names(nested, ec.units.by_size(10))) == ["", "0.1", "0.2"]


def test_units_by_a_function_of_module_and_number_of_parameters() -> None:
    seen = []

    def claims(module: nn.Module, numel: int) -> bool:
        seen.append(numel)
        return isinstance(module, nn.Linear) and numel < 20

    assert list(names(linears(), ec.units.by_function(claims))) == ["", "0", "1"]
    assert seen == [9, 16, 25]


def test_a_tied_parameter_lives_once_in_the_lowest_common_unit() -> None:
    found = names(build(), ec.units.by_type(nn.Embedding, nn.Linear))
    assert found[""][0] == "tokens.weight"
    assert "head" not in found
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner[1].weight = inner[0].weight
    model = nn.Sequential(inner, nn.Linear(2, 2))
    rule = ec.units.by_type(nn.Linear, nn.Sequential)
    assert names(model, rule) == {
        "": [],
        "0": ["0.0.weight"],
        "0.0": ["0.0.bias"],
        "0.1": ["0.1.bias"],
        "1": ["1.weight", "1.bias"],
    }


def test_a_module_at_two_places_is_one_unit() -> None:
    layer = nn.Linear(2, 2)
    assert list(names(nn.Sequential(layer, layer), ec.units.by_type(nn.Linear))) == ["", "0"]


def test_ignored_parameters_are_in_no_unit() -> None:
    model = linears()
    found = names(model, ec.units.by_type(nn.Linear), [model[1].weight])
    assert found["1"] == ["1.bias"]


def test_a_rule_that_matches_nothing_warns_with_the_classes_there_are() -> None:
    with pytest.warns(UserWarning, match=r"by_type\(Blok\) matches no module.*Linear, Sequential"):
        assert list(names(linears(), ec.units.by_type("Blok"))) == [""]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ec.units.by_size(0),
        lambda: ec.units.by_size("9"),
        lambda: ec.units.by_type(),
        lambda: ec.units.by_type(3),
        lambda: ec.units.by_function(3),
        lambda: plan_units(linears(), "blocks"),
    ],
)
def test_what_is_no_rule_is_refused(make) -> None:
    with pytest.raises(ArgumentError, match=r"give|needs|use"):
        make()


@pytest.mark.parametrize("size", [True, 0, 1.5])
def test_a_size_of_units_is_a_whole_number(size: object) -> None:
    with pytest.raises(ArgumentError, match=r"by_size\(num_parameters\) is .*whole number >= 1"):
        ec.units.by_size(size)


def wrap_by_block(world: ec.World) -> None:
    ec.FSDP(build(), world.group, units=ec.units.by_type(Block), min_num_params=0)


def test_no_two_ranks_parse_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # CPython 3.11 raises SystemError then: "AST constructor recursion depth mismatch".
    parse, inside, most = ast.parse, threading.Semaphore(4), []

    def slowly(*args: Any, **kwargs: Any) -> ast.AST:
        with inside:
            most.append(4 - inside._value)
            time.sleep(0.01)
            return parse(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", slowly)
    units._tree_of.cache_clear()
    units._uses_of.cache_clear()
    ec.run(wrap_by_block, 4)
    assert most
    assert set(most) == {1}
