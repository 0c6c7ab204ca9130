"""Attributes that ranks find replaced, and may replace for themselves."""

from __future__ import annotations

import threading
import types

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.threads import process_state
from echelon.comm.threads.process_state import OUTSIDE
from echelon.comm.threads.replaced_names import Names, register_replacements


class Holder:
    number = 1
    text = "a"


def module() -> types.ModuleType:
    made = types.ModuleType("of_a_test")
    vars(made)["number"] = 10
    return made


def test_what_is_written_is_what_was_read_in_modules_and_classes() -> None:
    holder = module()
    names = Names([(Holder, "number"), (holder, "number"), (Holder, "text")])
    before = names.read()
    assert before == (1, 10, "a")
    assert names.read() is before
    try:
        Holder.number, holder.number = 2, 20
        changed = names.read()
        assert changed == (2, 20, "a")
        names.write(before)
        assert (Holder.number, holder.number) == (1, 10)
        assert names.read() is before
        names.write(changed)
        assert (Holder.number, holder.number) == (2, 20)
    finally:
        Holder.number = 1


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


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_turn_writes_nothing_where_ranks_have_the_same(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = Names.write

    def counted(self: Names, values: tuple[object, ...]) -> None:
        written.append(threading.get_ident())
        write(self, values)

    monkeypatch.setattr(Names, "write", counted)
    for name, state in list(process_state._states.items()):
        names = getattr(state.restore, "__self__", None)
        if isinstance(names, Names):
            monkeypatch.setitem(process_state._states, name, state._replace(restore=names.write))

    def main(world: ec.World) -> None:
        for _ in range(20):
            world.group.barrier()

    ec.run(main, ranks)
    # In the first turn of a rank, and where the caller's are put back.
    assert 0 < len(written) < 20
