"""Rules, and the units that they make of a model."""

import ast
import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from echelon.errors import ArgumentError
from echelon.fsdp import units
from echelon.fsdp.units import Rule, plan_units
from tests.fsdp.models import Block, build
from tests.reference import assert_states_close, rows
from tests.worlds import KINDS, run_world


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
    assert names(build(), ec.units.by_type((nn.Embedding, "Linear"))) == found
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
        lambda: ec.units.by_type(()),
        lambda: ec.units.by_type((nn.Linear, 3)),
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


def test_no_two_threads_parse_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # CPython 3.11 raises SystemError then: "AST constructor recursion depth mismatch".
    parse, inside, most = ast.parse, threading.Semaphore(4), []

    def slowly(*args: Any, **kwargs: Any) -> ast.AST:
        with inside:
            most.append(4 - inside._value)
            time.sleep(0.01)
            return parse(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", slowly)
    units._tree_of.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        forwards = [kind.forward for kind in (nn.Linear, nn.LayerNorm, nn.ReLU, nn.Embedding)]
        list(pool.map(units._tree_of, forwards))
    assert len(most) == 4
    assert set(most) == {1}


# A module whose parameters the one around it uses itself is no unit ------------------------------

RULES = {
    "by size": ec.units.by_size(100),
    "by type": ec.units.by_type(nn.Linear, nn.LayerNorm),
    "by function": ec.units.by_function(lambda module, numel: isinstance(module, nn.Linear)),
}


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def trains_and_evaluates(world: ec.World) -> None:
    for rule in RULES.values():
        plain, model = encoder(), ec.FSDP(encoder(), world.group, units=rule, min_num_params=0)
        assert not [unit.name for unit in model.units if unit.name.endswith("out_proj")]
        assert len(model.units) > 3
        plain(torch.cat([rows(rank, 2, 3, 8) for rank in range(2)])).square().mean().backward()
        model(rows(world.rank, 2, 3, 8)).square().mean().backward()
        for one in (plain, model):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        assert_states_close(model.state_dict(), plain.state_dict(), rtol=1e-11, atol=1e-13)
        with torch.no_grad():  # where torch has a way past the layers of a block
            found = model.eval()(rows(world.rank, 2, 3, 8))
            torch.testing.assert_close(found, plain.eval()(rows(world.rank, 2, 3, 8)))


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_own_transformer_trains_in_units_of_any_rule(kind: str) -> None:
    run_world(kind, trains_and_evaluates, 2)


class Shapes(nn.Module):
    """Uses its children in every way that looks like another."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.described, self.read = (nn.Linear(4, 4) for _ in range(3))
        self.both, self.inner = nn.Linear(4, 4), nn.ModuleDict({"read": nn.Linear(4, 4)})
        nn.init.zeros_(self.called.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x)
        if isinstance(self.described.weight, nn.Parameter):
            x = x.to(self.described.weight.dtype)
        x = self.both(self.described(x)) + self.both.weight.sum()
        return self._last(F.linear(x, self.read.weight, bias=self.read.bias))

    def _last(self, x: Tensor) -> Tensor:
        return x @ self.inner.read.weight


class Replaced(Shapes):
    """Calls what its base only reads."""

    def _last(self, x: Tensor) -> Tensor:
        return self.inner.read(x)


@pytest.mark.parametrize(
    ("build", "left_out"), [(Shapes, {"read", "inner.read"}), (Replaced, {"read"})]
)
def test_what_is_called_is_a_unit_and_what_is_only_read_is_not(
    build: type[Shapes], left_out: set[str]
) -> None:
    model = build()
    rule = ec.units.by_type(nn.Linear)
    linear_names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {plan.name for plan in plan_units(model, rule)} == {""} | (linear_names - left_out)


def test_a_class_without_source_is_taken_as_it_is() -> None:
    scope = {"nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x): return x @ self.a.weight", scope)
    model = scope["Made"]()
    model.a = nn.Linear(2, 2)
    assert [plan.name for plan in plan_units(model, ec.units.by_type(nn.Linear))] == ["", "a"]


class Parameters(nn.Module):
    """A list and a dict of parameters, which are used and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([torch.ones(4), torch.ones(4, 4)])
        self.scales = nn.ParameterDict({"one": torch.ones(4)})
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x @ self.vectors[1] + self.vectors[0]) * self.scales["one"]


CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList)


@pytest.mark.parametrize(
    "rule",
    [
        ec.units.by_size(2),
        ec.units.by_type(*CONTAINERS, nn.Linear),
        ec.units.by_function(lambda module, numel: True),
    ],
    ids=str,
)
def test_a_container_without_a_forward_is_no_unit(rule: Rule) -> None:
    assert [plan.name for plan in plan_units(Parameters(), rule)] == ["", "layers.0"]


def trains_containers(world: ec.World) -> None:
    # With four ranks, a shard of four elements has one, which torch would broadcast silently.
    torch.manual_seed(0)
    plain = Parameters().double()
    model = ec.FSDP(copy.deepcopy(plain), world.group, units=ec.units.by_size(2), min_num_params=0)
    plain(torch.cat([rows(rank, 2, 4) for rank in range(4)])).square().mean().backward()
    model(rows(world.rank, 2, 4)).square().mean().backward()
    for module in (plain, model):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert_states_close(model.state_dict(), plain.state_dict(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_lists_and_dicts_of_parameters_train_in_units_by_size(kind: str) -> None:
    run_world(kind, trains_containers, 4)
