"""A group of processes that failed or was closed refuses more calls."""

import torch

import echelon as ec
from echelon.errors import StateError
from tests.comm.checking import refuses
from tests.processes import becomes_true


def goes_on(world: ec.World) -> str:
    group = world.group.subgroup(range(world.size))
    try:
        group.all_reduce(torch.ones(2 + world.rank))
    except ec.CollectiveMismatch:
        refuses(StateError, "start a new world", lambda: group.barrier())
        refuses(
            StateError, "CollectiveMismatch", lambda: group.all_reduce(torch.ones(1), async_op=True)
        )
    return "refused"


def test_a_group_that_failed_refuses_to_go_on() -> None:
    assert ec.run(goes_on, 2, "processes") == ["refused"] * 2


def goes_on_after_the_end(world: ec.World) -> str:
    work = world.group.all_reduce(torch.ones(100_000), async_op=True)
    world.close()  # delivers what is open
    assert work.done()
    work.wait()
    refuses(StateError, "its world was closed", lambda: world.group.barrier())
    refuses(StateError, "closed", lambda: world.group.all_reduce(torch.ones(1), async_op=True))
    return "refused"


def test_a_closed_world_has_delivered_everything_and_refuses_more() -> None:
    assert ec.run(goes_on_after_the_end, 2, "processes") == ["refused"] * 2


def issues_more_before_it_has_waited(world: ec.World) -> str:
    group = world.group.subgroup(range(world.size))
    first = group.all_reduce(torch.ones(2 + world.rank), async_op=True)
    assert becomes_true(first.done, 10.0)
    refuses(ec.CollectiveMismatch, "#0 of group", lambda: group.barrier())  # the cause, once
    refuses(StateError, "start a new world", lambda: group.barrier())
    return "told"


def test_a_failure_in_the_background_is_told_by_the_next_call() -> None:
    assert ec.run(issues_more_before_it_has_waited, 2, "processes") == ["told"] * 2
