"""Breakpoints of ``b`` stop every rank that comes to their line."""

import bdb
from collections import Counter

import pytest
import torch

import echelon as ec
from tests.laboratory.typed_commands import Typist


def loops(world: ec.World) -> list[int]:
    sums = []
    for number in range(3):
        if number == 0:
            world.breakpoint(rank=1)
        values = torch.tensor([number])
        world.group.all_reduce(values)
        sums.append(int(values.item()))
    return sums


IN_LOOP = loops.__code__.co_firstlineno + 7


@pytest.mark.slow
@pytest.mark.usefixtures("no_breakpoints")
def test_a_breakpoint_that_is_set_in_one_rank_stops_every_rank(typist: Typist) -> None:
    typist.types(f"b {IN_LOOP}", "c", *["c"] * 9)
    assert ec.run(loops, 3) == [[0, 3, 6]] * 3
    assert Counter(typist.prompts[2:]) == {f"(Pdb rank {rank}) ": 3 for rank in range(3)}
    typist.reads()


@pytest.mark.slow
@pytest.mark.usefixtures("no_breakpoints")
def test_the_first_rank_at_a_breakpoint_of_another_sees_where_all_are(typist: Typist) -> None:
    typist.types(f"b {IN_LOOP}", "c", "ranks", *["c"] * 9)
    ec.run(loops, 3)
    assert typist.reads().count(f"test_shared_breakpoints.py:{IN_LOOP}  waits for its turn") == 2


@pytest.mark.slow
@pytest.mark.usefixtures("no_breakpoints")
def test_a_breakpoint_that_one_rank_clears_is_cleared_in_all(typist: Typist) -> None:
    number = len(bdb.Breakpoint.bpbynumber)  # of the next one
    typist.types(f"b {IN_LOOP}", "c", "c", "c", f"clear {number}", "c")
    assert ec.run(loops, 3) == [[0, 3, 6]] * 3
    assert "Deleted breakpoint" in typist.reads()


@pytest.mark.slow
@pytest.mark.usefixtures("no_breakpoints")
def test_a_condition_chooses_the_rank_and_a_step_of_another_goes_on(typist: Typist) -> None:
    typist.types("n", "n", f"b {IN_LOOP}, world.rank == 2 and number == 1", *["n"] * 5, "c", "c")
    assert ec.run(loops, 3) == [[0, 3, 6]] * 3
    assert Counter(typist.prompts) == {"(Pdb rank 1) ": 9, "(Pdb rank 2) ": 1}
    assert typist.reads().count(f"({IN_LOOP})loops()") == 3
