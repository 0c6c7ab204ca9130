"""A rank that uses the group of another one is told so, and does not act in its name."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import echelon as ec
from echelon.comm.threads.rank_threads import this_rank
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


def test_a_thread_finds_the_rank_that_it_is_and_none_if_it_is_no_rank() -> None:
    def found() -> int | None:
        rank = this_rank()
        return None if rank is None else rank.rank

    def main(world: ec.World) -> tuple[Any, ...]:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(found).result()
        inner = ec.run(lambda _: found(), 2)
        return found(), other, inner, found()

    assert ec.run(main, 3) == [(rank, None, [0, 1], rank) for rank in range(3)]
    assert found() is None
