"""Globals of modules are read, put back, and made anew where a rank has none."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from echelon.c10d.exchanged_globals import ExchangedGlobals, Place


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("module_of_globals")
    vars(made).update(number=3, holder=SimpleNamespace(names=["a"]))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


PLACES = (
    Place("module_of_globals", ("number", "missing"), lambda value: value + 1, "counts"),
    Place("module_of_globals", ("holder.names",), lambda _: [], "lists"),
    Place("module_that_nobody_imports", ("number",), lambda value: value, "is not there"),
)


def test_values_are_put_back_and_what_is_not_there_is_left_out(module: ModuleType) -> None:
    places = ExchangedGlobals(PLACES)
    saved = places.save()
    assert saved == {
        ("module_of_globals", "number"): 3,
        ("module_of_globals", "holder.names"): ["a"],
    }
    vars(module).update(number=7, holder=SimpleNamespace(names=["b", "c"]))
    places.restore(saved)
    assert (module.number, module.holder.names) == (3, ["a"])


def test_a_rank_that_has_no_value_gets_what_is_there_at_first(module: ModuleType) -> None:
    values: dict[tuple[str, str], object] = {}
    ExchangedGlobals(PLACES).restore(values)
    assert (module.number, module.holder.names) == (4, [])
    assert values[("module_of_globals", "holder.names")] is module.holder.names
