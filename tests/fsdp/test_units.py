"""Rules, and the units that they make of a model."""

import copy
import inspect
import re

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


def uncalled_children() -> set[tuple[str, str]]:
    """By the source of torch: classes that use tensors of a child which they never call."""
    pairs = set()
    for name, kind in vars(nn).items():
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            source = inspect.getsource(kind)
            used = set(re.findall(r"self\.(\w+)\.(?:weight|bias)\b", source))
            pairs |= {(name, child) for child in used if f"self.{child}(" not in source}
    return pairs


def test_the_modules_of_torch_that_never_call_a_child_are_in_the_table() -> None:
    table = {(kind.rpartition(".")[2], child) for kind, child in units._NEVER_CALLED.items()}
    assert {pair for pair in table if hasattr(nn, pair[0])} == uncalled_children()


class Reads(nn.Module):
    """Uses the parameters of a child, which it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(F.linear(x, self.read.weight, self.read.bias))


def reads() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Reads(), nn.Tanh(), Reads()).double()


def trains_what_is_read(world: ec.World, least: int, layout: str) -> None:
    plain = reads()
    rule = ec.units.by_type(Reads) if least == 0 else ec.units.by_type(nn.Linear)
    model = ec.FSDP(reads(), world.group, units=rule, min_num_params=least, layout=layout)
    assert len(model.units) == (3 if least == 0 else 5)
    for module, batch in (
        (plain, torch.cat([rows(rank, 2, 4) for rank in range(2)])),
        (model, rows(world.rank, 2, 4)),
    ):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            module(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_states_close(model.state_dict(), plain.state_dict(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("least", [0, 10**6])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_trains_in_the_unit_around_it_or_replicated(
    kind: str, least: int, layout: str
) -> None:
    run_world(kind, trains_what_is_read, 2, (least, layout))


def reads_a_unit(world: ec.World, grad: bool) -> None:
    rule = ec.units.by_type(nn.Linear)
    model = ec.FSDP(reads(), world.group, units=rule, min_num_params=0)
    with torch.set_grad_enabled(grad):
        model(rows(world.rank, 2, 4))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_that_is_read_and_never_called_is_an_error_with_its_name(
    kind: str, grad: bool
) -> None:
    with pytest.raises(ec.EchelonError, match=r"'?0\.read\.weight"):
        run_world(kind, reads_a_unit, 2, (grad,))


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
