"""Rules make no unit of a module whose parameters the one around it uses itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from echelon.fsdp.units import Rule, plan_units
from tests.worlds import KINDS, run_world

RULES = {
    "by size": ec.units.by_size(100),
    "by type": ec.units.by_type(nn.Linear, nn.LayerNorm),
    "by function": ec.units.by_function(lambda module, numel: isinstance(module, nn.Linear)),
}


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def rows(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 3, 8, dtype=torch.float64, generator=generator)


def trains_and_evaluates(world: ec.World) -> None:
    for rule in RULES.values():
        plain, model = encoder(), ec.FSDP(encoder(), world.group, units=rule, min_num_params=0)
        assert not [unit.name for unit in model.units if unit.name.endswith("out_proj")]
        assert len(model.units) > 3
        loss = plain(torch.cat([rows(0), rows(1)])).square().mean()
        loss.backward()
        model(rows(world.rank)).square().mean().backward()
        for one in (plain, model):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-11, atol=1e-13)
        with torch.no_grad():  # where torch has a way past the layers of a block
            found = model.eval()(rows(world.rank))
            torch.testing.assert_close(found, plain.eval()(rows(world.rank)))


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
    rule: Rule = ec.units.by_type(nn.Linear)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {plan.name for plan in plan_units(model, rule)} == {""} | (names - left_out)


def test_a_class_without_source_is_taken_as_it_is() -> None:
    scope = {"nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x): return x @ self.a.weight", scope)
    model = scope["Made"]()
    model.a = nn.Linear(2, 2)
    assert [plan.name for plan in plan_units(model, ec.units.by_type(nn.Linear))] == ["", "a"]
