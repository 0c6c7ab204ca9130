"""The first difference between the facts of ranks."""

import pytest

from echelon.comm.agreement import agree, compare, first_difference
from echelon.comm.world import World
from echelon.errors import ModelMismatch
from echelon.launch.run import run


def test_equal_facts_have_no_difference_whatever_their_order() -> None:
    assert first_difference([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}]) is None


def test_a_fact_that_one_rank_lacks_is_a_difference() -> None:
    assert first_difference([{"a": "1"}, {}]) == ("a", {0: "1", 1: "not there"})


def test_a_comparison_refuses_another_order() -> None:
    with pytest.raises(ModelMismatch, match="the order of their options, at position 0"):
        compare("option", [{"a": "1", "b": "2"}, {"b": "2", "a": "1"}])


def agrees(world: World, *values: str) -> list[int]:
    facts = {"option": {"same": "1"}, "layer": {"width": values[world.rank]}}
    return agree(world.group, facts, beside=world.rank)


def test_ranks_that_agree_get_what_each_said_beside() -> None:
    assert run(agrees, 2, "threads", args=("8", "8")) == [[0, 1], [0, 1]]


def test_ranks_that_differ_all_raise_the_first_difference() -> None:
    with pytest.raises(ModelMismatch, match="layer 'width'"):
        run(agrees, 2, "threads", args=("8", "16"))
