"""The test doubles do what they say, and nothing else."""

import doctest
import threading

import pytest
import torch

import echelon as ec
from echelon import testing
from echelon.comm.threads.blocking_calls import GRACE_S
from echelon.errors import ArgumentError, CollectiveMismatch, CommTimeout, RankError
from echelon.testing import FAULTS, Fault, FaultyGroup, InjectedFault, faults, run_faulty, slow
from tests.comm import collective_checks, order_checks
from tests.comm.checking import checks_of, run_checks

BY_NAME = {fault.name: fault for fault in FAULTS}


def test_the_examples_run() -> None:
    results = doctest.testmod(faults, optionflags=doctest.ELLIPSIS)
    assert results.attempted >= 4
    assert results.failed == 0


def test_run_ranks_is_run() -> None:
    assert testing.run_ranks is ec.run


def test_faults_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(FAULTS)
    assert [str(fault) for fault in FAULTS] == list(BY_NAME)


HARMLESS = Fault(name="nothing", strike=lambda ticket, issue, sleep: issue(ticket), ends_in=None)


@pytest.mark.slow
def test_a_double_forwards_every_call_as_it_is() -> None:
    names = [
        name
        for name in checks_of(collective_checks, order_checks)
        if not name.endswith(("every_kind_at_once",))
    ]

    def main(world: ec.World) -> int:
        double = ec.World(FaultyGroup(world.group, HARMLESS), backend="double")
        return run_checks(double if world.rank == 1 else world, names)

    assert ec.run(main, 4) == [len(names)] * 4


def test_a_double_looks_like_its_group() -> None:
    def main(world: ec.World) -> None:
        double, group = FaultyGroup(world.group, HARMLESS), world.group
        for name in ("name", "rank", "ranks", "size", "device", "timeout", "shares_memory"):
            assert getattr(double, name) == getattr(group, name)

    ec.run(main, 2)


def all_reduce_thrice(world: ec.World) -> list[float]:
    results = []
    for step in range(3):
        value = torch.tensor([float(world.rank + step)])
        world.group.all_reduce(value, label=f"step {step}")
        results.append(value.item())
    return results


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_fault_falls_on_the_chosen_call(at) -> None:
    with pytest.raises(InjectedFault, match=f"of 'step {at}' .#{at} of group 'world'."):
        run_faulty(all_reduce_thrice, 2, BY_NAME["raises"], rank=0, at=at)


def test_a_fault_beyond_the_last_call_does_nothing() -> None:
    results = run_faulty(all_reduce_thrice, 2, BY_NAME["raises"], rank=0, at=3)
    assert results == [[1.0, 3.0, 5.0]] * 2


def test_a_skipped_call_is_missing_and_later_calls_are_in_step_again() -> None:
    def main(world: ec.World) -> float:
        value = torch.tensor([1.0])
        for _ in range(2 + (world.rank == 1)):  # one call more, of which one is skipped
            value.fill_(1.0)
            world.group.all_reduce(value)
        return value.item()

    assert run_faulty(main, 2, BY_NAME["skips a call"], rank=1, at=1) == [2.0, 2.0]


def test_a_repeated_call_is_made_twice() -> None:
    def main(world: ec.World) -> float:
        value = torch.tensor([1.0])
        for _ in range(2 - (world.rank == 1)):
            world.group.all_reduce(value, "max")
        return value.item()

    assert run_faulty(main, 2, BY_NAME["repeats a call"], rank=1) == [1.0, 1.0]


@pytest.mark.slow
def test_a_slow_rank_is_late_at_every_call_from_the_chosen_one_on() -> None:
    with pytest.raises(CommTimeout, match=r"of 'step 1' .* for rank 1 in vain"):
        run_faulty(all_reduce_thrice, 2, slow(30), rank=1, at=1, timeout=4 * GRACE_S)
    assert run_faulty(all_reduce_thrice, 2, slow(0.01), rank=1) == [[1.0, 3.0, 5.0]] * 2


def messages_first(world: ec.World) -> None:
    value = torch.ones(1)
    if world.rank == 0:
        world.group.send(value, 1)
    else:
        world.group.recv(value, 0)
    world.group.all_reduce(value)


def test_a_lie_waits_for_a_collective_and_other_faults_fall_on_messages_too() -> None:
    with pytest.raises(CollectiveMismatch, match="all_reduce"):
        run_faulty(messages_first, 2, BY_NAME["has another dtype"], rank=1, at=0)
    with pytest.raises(InjectedFault, match="fail at recv"):
        run_faulty(messages_first, 2, BY_NAME["raises"], rank=1, at=0)


def test_a_subgroup_has_the_fault_too() -> None:
    def main(world: ec.World) -> None:
        world.group.subgroup([0, 1]).barrier()

    with pytest.raises(InjectedFault, match=r"group 'world\.1'"):
        run_faulty(main, 2, BY_NAME["raises"], rank=1)


def test_windows_of_a_double_are_shared() -> None:
    def main(world: ec.World) -> float:
        window = world.group.window(4)
        window.local.fill_(world.rank)
        world.group.barrier()
        return window.peer(1 - world.rank)[0].item()

    assert run_faulty(main, 2, BY_NAME["raises"], rank=1, at=1) == [1.0, 0.0]


def test_a_fault_that_ends_the_process_is_refused_where_ranks_are_threads() -> None:
    for fault in FAULTS:
        if fault.needs_process:
            with pytest.raises(ArgumentError, match="use world='processes'"):
                run_faulty(all_reduce_thrice, 2, fault, rank=0)


def test_the_faulty_rank_must_be_one_of_the_ranks() -> None:
    with pytest.raises(RankError, match="rank is 2"):
        run_faulty(all_reduce_thrice, 2, FAULTS[0], rank=2)


def test_a_simulated_rank_that_sleeps_is_woken_when_its_world_has_ended() -> None:
    with pytest.raises(CommTimeout):
        run_faulty(all_reduce_thrice, 2, BY_NAME["sleeps for ever"], rank=1, timeout=0.1)
    sleepers = [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    for thread in sleepers:
        thread.join(10.0)
        assert not thread.is_alive()
