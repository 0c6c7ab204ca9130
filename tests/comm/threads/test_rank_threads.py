"""A rank that uses the group of another one is told so, and does not act in its name."""

import re

import pytest

import echelon as ec
from echelon.errors import StateError

kept: dict[str, ec.Group] = {}


def uses_the_group_of_the_first_to_come(world: ec.World) -> None:
    kept.setdefault("group", world.group).barrier()


def test_a_call_on_the_group_of_another_rank_is_refused() -> None:
    kept.clear()
    with pytest.raises(StateError) as caught:
        ec.run(uses_the_group_of_the_first_to_come, 3)
    assert re.match(r"rank \d calls barrier \(#1 of group 'world'\)", str(caught.value))
    assert f"on the group of rank {kept['group'].rank}. Simulated ranks share" in str(caught.value)
