"""Turns: who runs when, what each rank has for itself, and what happens when a rank blocks."""

from __future__ import annotations

import os
import queue
import random
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.comm.group import Group
from echelon.comm.threads import turns
from echelon.comm.threads.blocking_calls import join_in_turn
from echelon.comm.threads.group import ThreadGroup
from echelon.comm.threads.process_state import OUTSIDE
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.comm.threads.turns import BLOCKED_S, Turns
from echelon.process import time_limits

RANKS = 4


def thread_world(world: ec.World) -> ThreadWorld:
    """What the simulated ranks of a world share."""
    assert isinstance(world.group, ThreadGroup)
    return world.group.thread_world


def work_for(seconds: float) -> None:
    """Compute for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_ranks_run_one_after_the_other_from_wait_to_wait() -> None:
    turns: list[tuple[int, str]] = []

    def main(world: ec.World) -> None:
        for step in "ab":
            turns.append((world.rank, step))
            work_for(0.001)
            turns.append((world.rank, step))
            world.group.barrier()

    ec.run(main, 3)
    # The last to come into the first barrier goes on, and the others follow in cyclic order.
    ranks = [0, 1, 2, 2, 0, 1]
    steps = ["a"] * 3 + ["b"] * 3
    assert turns == [turn for turn in zip(ranks, steps, strict=True) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_same_program_has_the_same_interleaving_in_every_run(ranks: int) -> None:
    def main(world: ec.World) -> None:
        draws = random.Random(world.rank)
        group = world.group
        for number in range(20):
            trace.append((world.rank, number))
            work_for(draws.random() * 0.0005)
            if number % 3 == 0 and world.size > 1:
                works = [
                    group.isend(torch.ones(1), (world.rank + 1) % world.size),
                    group.irecv(torch.ones(1), (world.rank - 1) % world.size),
                ]
                while not all(work.done() for work in works):
                    trace.append((world.rank, -1))
            elif number % 3 == 1:
                work = group.all_reduce(torch.ones(1), async_op=True)
                trace.append((world.rank, -2))
                assert work is not None
                work.wait()
            else:
                group.barrier()

    traces: list[list[tuple[int, int]]] = []
    for _ in range(5):
        trace: list[tuple[int, int]] = []
        ec.run(main, ranks)
        traces.append(trace)
    assert all(other == traces[0] for other in traces)


def test_each_rank_has_its_own_state_of_the_process_and_the_caller_keeps_its_own(
    tmp_path: Any,
) -> None:
    numpy = pytest.importorskip("numpy")

    def drawn() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(numpy.random.rand())

    def seeded(seed: int) -> tuple[float, float, float]:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        return drawn()

    def main(world: ec.World) -> tuple[Any, ...]:
        rank, group = world.rank, world.group
        first = seeded(rank)
        os.environ["RANK_OF_TEST"] = str(rank)
        folder = tmp_path / str(rank)
        folder.mkdir()
        os.chdir(folder)
        warnings.filterwarnings("ignore", f"of rank {rank}")
        torch.use_deterministic_algorithms(rank == 1)
        torch.set_default_dtype(torch.float64 if rank == 2 else torch.float32)
        torch.set_float32_matmul_precision("medium" if rank == 3 else "highest")
        group.barrier()
        assert os.environ["RANK_OF_TEST"] == str(rank)
        assert os.getcwd() == str(folder)
        patterns = [getattr(entry[1], "pattern", "") for entry in warnings.filters]
        assert [p for p in patterns if p.startswith("of rank")] == [f"of rank {rank}"]
        assert torch.are_deterministic_algorithms_enabled() == (rank == 1)
        assert torch.ones(1).dtype == (torch.float64 if rank == 2 else torch.float32)
        assert torch.get_float32_matmul_precision() == ("medium" if rank == 3 else "highest")
        return first, drawn()

    folder, filters = os.getcwd(), list(warnings.filters)
    expected_after = (seeded(7), drawn(), drawn())
    before = seeded(7)
    results = ec.run(main, RANKS)
    assert (before, drawn(), drawn()) == expected_after
    assert os.getcwd() == folder
    assert warnings.filters == filters
    assert "RANK_OF_TEST" not in os.environ
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_float32_matmul_precision() == "highest"
    for rank, result in enumerate(results):
        with torch.random.fork_rng():
            torch.set_default_dtype(torch.float32)
            first = seeded(rank)
            if rank == 2:
                torch.set_default_dtype(torch.float64)
            assert result == (first, drawn())
            torch.set_default_dtype(torch.float32)


def test_the_process_is_put_back_after_an_error() -> None:
    def main(world: ec.World) -> None:
        os.environ["RANK_OF_TEST"] = str(world.rank)
        torch.manual_seed(world.rank)
        world.group.barrier()
        raise KeyError("late")

    torch.manual_seed(3)
    expected = torch.initial_seed(), torch.rand(1)
    torch.manual_seed(3)
    with pytest.raises(KeyError):
        ec.run(main, RANKS)
    assert "RANK_OF_TEST" not in os.environ
    assert (torch.initial_seed(), torch.rand(1)) == expected
    assert time.sleep.__module__ == "time"
    assert threading.Thread.join.__module__ == "threading"
    assert threading.Condition.wait.__module__ == "threading"


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_rank_that_waits_is_not_woken_before_its_turn(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    orders: list[Any] = []
    wait = turns.Wakeup.wait

    def counted(wakeup: turns.Wakeup, seconds: float | None = None) -> bool:
        waits.append(threading.get_ident())
        return wait(wakeup, seconds)

    def main(world: ec.World) -> None:
        orders.append(thread_world(world).order)
        for _ in range(20):
            world.group.barrier()

    monkeypatch.setattr(turns.Wakeup, "wait", counted)
    ec.run(main, ranks)
    assert 20 <= len(waits) <= orders[0]._turn


def test_a_rank_that_asks_in_a_loop_lets_others_run() -> None:
    def main(world: ec.World) -> int:
        if world.rank == 1:
            world.group.send(torch.ones(1), 0)
            return 0
        work = world.group.irecv(torch.zeros(1), 1)
        asked = 0
        while not work.done():
            asked += 1
        return asked

    assert ec.run(main, 2)[0] < 3


@pytest.mark.slow
def test_waiting_ranks_time_out_by_the_time_that_one_rank_takes_and_not_all_together() -> None:
    def main(world: ec.World) -> None:
        work_for(0.15)
        world.group.barrier()

    ec.run(main, 6, timeout=0.5)  # 0.9 s on this machine, 0.15 s on one with 6 cores


def test_a_rank_that_computes_for_too_long_is_named_and_those_without_a_turn_are_not() -> None:
    def main(world: ec.World) -> None:
        if world.rank == 1:
            work_for(1.0)
        world.group.barrier()

    with pytest.raises(ec.CommTimeout, match=r"waited 0\.3 s for rank 1 in vain") as info:
        ec.run(main, 4, timeout=0.3)
    assert info.value.missing == (1,)
    assert "rank 1 at step 0 computes" in str(info.value)


def polls(group: Group) -> None:
    work = group.all_reduce(torch.ones(1), async_op=True)
    while not work.done():
        pass


@pytest.mark.parametrize("meet", [Group.barrier, polls])
def test_a_rank_that_computes_for_too_long_is_named_after_the_timeout_of_the_group(meet) -> None:
    def main(world: ec.World) -> None:
        world.group.timeout = 0.3
        meet(world.group)
        if world.rank == 1:  # the last that came, so the other one has no turn
            work_for(1.0)

    with pytest.raises(ec.CommTimeout, match=r"waited 0\.3 s for rank 1 in vain") as info:
        ec.run(main, 2)
    assert info.value.missing == (1,)


@pytest.mark.slow
def test_a_rank_in_no_call_has_the_patience_of_the_world() -> None:
    def main(world: ec.World) -> None:
        world.group.timeout = 1.0
        world.group.barrier()
        time.sleep(0.3)  # both hand on
        work_for(1.5)

    ec.run(main, 2)


def test_a_rank_that_waits_for_a_thread_of_its_own_lets_others_run() -> None:
    def main(world: ec.World) -> float:
        group = world.group.subgroup(range(world.size))
        assert group is not None
        total = torch.ones(1)
        results: queue.Queue[float] = queue.Queue()

        def reduce() -> None:
            group.all_reduce(total)
            results.put(total.item())

        thread = threading.Thread(target=reduce)
        thread.start()
        value = results.get()
        thread.join()
        return value

    started_s = time.perf_counter()
    assert ec.run(main, 3) == [3.0] * 3
    assert time.perf_counter() - started_s < BLOCKED_S


def test_worlds_of_two_threads_do_not_mix_their_ranks() -> None:
    def main(world: ec.World, seed: int) -> list[float]:
        torch.manual_seed(seed + world.rank)
        drawn = []
        for _ in range(20):
            drawn.append(torch.rand(1).item())
            world.group.barrier()
        return drawn

    expected = {seed: ec.run(main, 3, args=(seed,)) for seed in (10, 20)}
    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda s=seed: results.update({s: ec.run(main, 3, args=(s,))}))
        for seed in (10, 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


def test_a_world_inside_of_a_turn_keeps_the_state_of_its_rank() -> None:
    def inner(world: ec.World) -> float:
        before = torch.rand(1).item()
        world.group.barrier()
        torch.manual_seed(99)
        return before

    def outer(world: ec.World) -> tuple[list[float], float]:
        torch.manual_seed(world.rank)
        world.group.barrier()
        return ec.run(inner, 2), torch.rand(1).item()

    for rank, (within, after) in enumerate(ec.run(outer, 2)):
        torch.manual_seed(rank)
        assert within == [after] * 2 == [torch.rand(1).item()] * 2


def test_ranks_that_wait_for_each_other_outside_of_groups_get_their_turns() -> None:
    meeting = threading.Barrier(3)

    def main(world: ec.World) -> int:
        return meeting.wait(20)

    assert sorted(ec.run(main, 3)) == [0, 1, 2]


def test_an_import_is_no_race(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_by_ranks.py").write_text(
        "import time\ncount = 0\ntime.sleep(0.01)\ncount += 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def main(world: ec.World) -> int:
        import imported_by_ranks  # type: ignore[import-not-found]

        return imported_by_ranks.count

    try:
        assert ec.run(main, RANKS) == [1] * RANKS
    finally:
        sys.modules.pop("imported_by_ranks", None)


def test_a_rank_whose_world_was_left_before_its_first_turn_does_not_start() -> None:
    order = Turns(1)
    order.close()
    with pytest.raises(ec.errors.StateError, match="rank 0 does not start"), order.of_rank(0):
        pytest.fail("it has started")


def test_a_sleep_ends_when_its_time_is_up_and_when_another_thread_wakes_it() -> None:
    order = Turns(1)

    def wake() -> None:
        with order.lock:
            order.wake(0, [sleeper])

    with order.of_rank(0):
        sleeper = threading.get_ident()
        with order.lock:
            start_s = time.monotonic()
            order.sleep(0, 0.05, 20)
            order.resume(0)
            assert 0.05 <= time.monotonic() - start_s < 5
            threading.Thread(target=wake).start()  # it waits for the lock
            order.sleep(0, 20, 20)
            order.resume(0)
        assert time.monotonic() - start_s < 10
        order.yield_turn(0)
    order.close()


@pytest.mark.slow
def test_the_clocks_of_ranks_show_their_own_time_joined_where_they_meet() -> None:
    def main(world: ec.World) -> tuple[float, float]:
        order = thread_world(world).order
        time.sleep(0.1 * (1 + world.rank))
        before = 1e-9 * order.clocks.read(world.rank)
        world.group.all_reduce(torch.ones(1))
        return before, 1e-9 * order.clocks.read(world.rank)

    results = ec.run(main, 3)
    for rank, (before, after) in enumerate(results):
        # One clock for all would have shown 0.3 s for rank 1, and 0.6 s for rank 2.
        assert 0.1 * (1 + rank) <= before < 0.1 * (1 + rank) + 0.08
        assert after >= results[2][0]


@pytest.mark.slow
def test_no_clock_of_a_rank_runs_while_ranks_are_held() -> None:
    clocks: list[int] = []  # in nanoseconds

    def main(world: ec.World) -> None:
        order = thread_world(world).order
        if world.rank == 1:
            before = [order.clocks.read(rank) for rank in range(2)]
            with order.held():
                held = [order.clocks.read(rank) for rank in range(2)]
                time.sleep(0.5)
                clocks.extend(order.clocks.read(rank) - held[rank] for rank in range(2))
            clocks.extend(order.clocks.read(rank) - before[rank] for rank in range(2))
        world.group.barrier()

    ec.run(main, 2, timeout=0.4)  # the other rank waits for as long as the ranks are held
    assert clocks[:2] == [0, 0]
    assert max(clocks[2:]) < 0.3e9


def test_clocks_run_on_when_another_world_keeps_the_process_of_ranks_that_were_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, other = Turns(1), object()
    with order.of_rank(0):
        with pytest.raises(ec.errors.StateError, match="another thread"), order.held():
            OUTSIDE.lock.acquire(other)
            monkeypatch.setattr(time_limits, "OTHER_WORLD_S", 0.01)
        OUTSIDE.lock.release(other)
        before = order.clocks.read(0)
        time.sleep(0.01)
        assert order.clocks.read(0) - before >= 1e7
    order.close()


def test_the_process_has_the_callers_state_while_ranks_are_held() -> None:
    ranks_draw = threading.Event()
    held, go_on = threading.Event(), threading.Event()
    random.seed(5)
    expected = [random.random() for _ in range(2)]
    random.seed(5)
    assert random.random() == expected[0]

    def main(world: ec.World) -> float:
        random.seed(100 + world.rank)
        first = random.random()
        if world.rank == 0:
            order = thread_world(world).order
            with order.held():
                assert os.environ.get("ECHELON_HELD") is None
                held.set()
                join_in_turn(stand_in, 10)
        os.environ["ECHELON_HELD"] = "1"
        ranks_draw.set()
        world.group.barrier()
        return first + random.random()

    def look() -> None:
        held.wait(10)
        assert not ranks_draw.wait(0.1)
        assert random.random() == expected[1]
        inner.extend(ec.run(lambda world: world.size, 2))  # another world may run meanwhile
        go_on.set()

    inner: list[int] = []
    stand_in = threading.Thread(target=look)
    stand_in.start()
    results = ec.run(main, 2)
    assert go_on.is_set()
    assert inner == [2, 2]
    for rank, result in enumerate(results):
        draws = random.Random(100 + rank)
        assert result == draws.random() + draws.random()
