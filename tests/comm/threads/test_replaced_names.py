"""Attributes that ranks find replaced, and may replace for themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.threads import process_state
from echelon.comm.threads.process_state import OUTSIDE
from echelon.comm.threads.replaced_names import Names, Place, register_replacements
from tests.transformers_models import of_gpt2


class Holder:
    number = 1
    text = "a"


def module() -> ModuleType:
    made = ModuleType("of_a_test")
    vars(made)["number"] = 10
    return made


def test_what_is_written_is_what_was_read_in_modules_and_classes() -> None:
    holder = module()
    names = Names([Place(holder, ("number",)), Place(Holder, ("number", "text"))])
    before = names.read()
    assert before == (10, 1, "a")
    assert names.read() is before
    try:
        Holder.number, holder.number = 2, 20
        changed = names.read()
        assert changed == (20, 2, "a")
        names.write(before)
        assert (Holder.number, holder.number) == (1, 10)
        assert names.read() is before
        names.write(changed)
        assert (Holder.number, holder.number) == (2, 20)
    finally:
        Holder.number = 1


def test_a_module_that_is_imported_later_is_exchanged_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(
        [
            Place("of_a_test", ("number", "missing"), lambda value: value + 1),
            Place("of_a_test", ("holder.names",), lambda _: []),
        ]
    )
    without = names.read()
    assert names.first_values(without) == without
    late = module()
    vars(late)["holder"] = holder = SimpleNamespace(names=["a"])
    monkeypatch.setitem(sys.modules, "of_a_test", late)
    there = names.read()
    assert (there[0], there[2]) == (10, ["a"])
    assert names.first_values(there)[0] == 11  # of a rank that starts now
    names.write(without)  # those of a rank that started before
    state: Any = late
    assert (state.number, holder.names) == (11, [])
    changed = names.read()
    names.write(there)
    assert (state.number, holder.names) == (10, ["a"])
    names.write(changed)
    assert (state.number, holder.names) == (11, [])


def test_a_module_that_takes_the_place_of_another_one_is_exchanged_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed, imported = module(), module()
    monkeypatch.setitem(sys.modules, "of_a_test", failed)
    names = Names([Place("of_a_test", ("number",))])
    monkeypatch.setitem(sys.modules, "of_a_test", imported)
    before = names.read()
    state: Any = imported
    state.number = 2
    names.read()
    names.write(before)
    assert state.number == 10


def test_a_module_is_left_alone_until_its_import_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    late: Any = ModuleType("of_a_test")
    late.__spec__ = SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, "of_a_test", late)
    names = Names([Place("of_a_test", ("number",))])
    names.write(names.read())
    late.number = 3
    late.__spec__ = None
    assert names.read() == (3,)


def test_ranks_find_replacements_and_may_replace_them_for_themselves() -> None:
    holder = module()

    def first(current: int, new: int) -> int:
        return current * new

    register_replacements("of a test", [(holder, "number", 3), (Holder, "number", 5)], first)

    def main(world: ec.World) -> list[int]:
        seen = [holder.number, Holder.number]
        if world.rank == 1:
            holder.number = 7
        world.group.barrier()
        return [*seen, holder.number]

    try:
        assert ec.run(main, 3) == [[30, 5, 30], [30, 5, 7], [30, 5, 30]]
        assert (holder.number, Holder.number) == (10, 1)
        holder.number = 11
        assert ec.run(main, 1) == [[33, 5, 33]]  # of what is there when the ranks start
    finally:
        OUTSIDE.load()
        process_state._states.pop("of a test")
        process_state._at_registration.pop("of a test")
        OUTSIDE._values.pop("of a test", None)


def test_a_function_of_layers_that_a_rank_replaces_over_a_wait_is_that_ranks_alone() -> None:
    original = nn.init.uniform_

    def main(world: ec.World) -> tuple[bool, float]:
        if world.rank == 1:
            nn.init.uniform_ = nn.init.zeros_
        world.group.barrier()
        alike = nn.init.uniform_ is original
        return alike, nn.init.uniform_(torch.ones(1)).item()

    (first, _), (second, value) = ec.run(main, 2)
    assert (first, second, value) == (True, False, 0.0)
    assert nn.init.uniform_ is original


def test_a_rank_that_replaces_a_function_twice_finds_its_own_in_between() -> None:
    @contextmanager
    def replaced(world: ec.World, value: float) -> Iterator[None]:
        found = nn.init.kaiming_uniform_
        nn.init.kaiming_uniform_ = lambda tensor, *_, **__: nn.init.constant_(tensor, value)
        world.group.barrier()
        try:
            yield
        finally:
            nn.init.kaiming_uniform_ = found
            world.group.barrier()

    def main(world: ec.World) -> list[float]:
        with replaced(world, world.rank + 2):
            with replaced(world, 10 * world.rank + 10):
                inner = nn.Linear(1, 1).weight.item()
            outer = nn.Linear(1, 1).weight.item()
        return [inner, outer, abs(nn.Linear(1, 1).weight.item()) <= 1]

    assert ec.run(main, 4) == [[10 * rank + 10, rank + 2, True] for rank in range(4)]


def test_what_ranks_have_replaced_is_as_before_when_they_have_ended() -> None:
    library = pytest.importorskip("transformers")
    from transformers import initialization, modeling_utils

    places = [(torch.nn.init, name) for name in vars(torch.nn.init)]
    places += [(torch, "get_default_dtype"), (torch, "set_default_dtype"), (torch, "linspace")]
    places += [(initialization, name) for name in ("no_tie_weights", "no_init_weights")]
    places += [(modeling_utils.PreTrainedModel, name) for name in ("tie_weights", "init_weights")]
    before = [vars(place)[name] for place, name in places]

    def main(world: ec.World) -> None:
        with initialization.no_init_weights(), initialization.no_tie_weights():
            world.group.barrier()
            library.GPT2LMHeadModel(of_gpt2(width=8, layers=1))
        torch.set_default_dtype(torch.float64)
        torch.nn.init.ones_ = torch.nn.init.zeros_
        torch.linspace = torch.zeros
        world.group.barrier()

    ec.run(main, 4)
    assert [vars(place)[name] for place, name in places] == before
    assert torch.get_default_dtype() == torch.float32


LATE = """
class Model:
    kind = "whole"
    parts = {"a": 1}
"""


def test_what_a_rank_replaces_in_a_module_that_it_has_just_imported_is_that_ranks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late_by_ranks.py").write_text(LATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = Names(
        [
            Place("imported_late_by_ranks", ("Model.kind",)),
            Place("imported_late_by_ranks", ("Model.parts",), dict),
        ]
    )
    remove = process_state.register_state("late", names.read, names.write, names.first_values)

    def main(world: ec.World) -> tuple[str, list[str]]:
        from imported_late_by_ranks import Model  # type: ignore[import-not-found]

        if world.rank == 0:  # no other rank has begun yet
            Model.kind = "nothing"
            Model.parts["b"] = 2
        seen = Model.kind, sorted(Model.parts)
        world.group.barrier()
        return seen

    try:
        for _ in range(2):  # in the second run the module is there before the ranks are
            assert ec.run(main, 3) == [("nothing", ["a", "b"]), ("whole", ["a"]), ("whole", ["a"])]
    finally:
        OUTSIDE.load()
        remove()
        sys.modules.pop("imported_late_by_ranks", None)
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("echelon")]


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_turn_writes_nothing_where_ranks_have_the_same(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def counted(name: str, names: Names) -> Callable[[Any], None]:
        def write(values: Any) -> None:
            written.append(name)
            names.write(values)

        return write

    for name, state in list(process_state._states.items()):
        names = getattr(state.restore, "__self__", None)
        if isinstance(names, Names) and name != "libraries":  # of which each rank has its own
            state = state._replace(restore=counted(name, names))
            monkeypatch.setitem(process_state._states, name, state)

    def main(world: ec.World) -> None:
        for _ in range(20):
            world.group.barrier()

    ec.run(main, ranks)
    # In the first turn of a rank, and where the caller's are put back.
    assert 0 < len(written) < 20
