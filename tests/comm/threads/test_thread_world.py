"""Deadlocks of simulated ranks are seen when they form, and nothing else is taken for one."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

import echelon as ec
from echelon.errors import CommTimeout, DeadlockError

FAST_S = 1.0  # detection takes milliseconds; the timeout of the world is 300 s


Main = Callable[[ec.World], None]


def one() -> torch.Tensor:
    return torch.ones(1)


def both_send(world: ec.World) -> None:
    world.group.send(one(), 1 - world.rank)
    world.group.recv(one(), 1 - world.rank)


def both_receive(world: ec.World) -> None:
    world.group.recv(one(), 1 - world.rank, tag=4)


def collective_against_message(world: ec.World) -> None:
    if world.rank == 0:
        world.group.all_reduce(one(), label="loss")
    else:
        world.group.recv(one(), 0)


def wrong_tags(world: ec.World) -> None:
    if world.rank == 0:
        world.group.send(one(), 1, tag=1)
    else:
        world.group.recv(one(), 0, tag=2)


def one_returns(world: ec.World) -> None:
    if world.rank == 0:
        world.group.barrier()


def three_in_a_circle(world: ec.World) -> None:
    if world.rank < 3:
        world.group.recv(one(), (world.rank + 1) % 3)


def across_subgroups(world: ec.World) -> None:
    low, high = world.group.subgroup([0, 1]), world.group.subgroup([1, 2])
    if world.rank == 0:
        low.barrier()
    if world.rank == 1:
        high.barrier()
        low.barrier()
    if world.rank == 2:
        world.group.recv(one(), 0)


def work_that_nobody_joins(world: ec.World) -> None:
    if world.rank == 0:
        world.group.all_reduce(one(), async_op=True).wait()
    else:
        world.group.recv(one(), 0)


@pytest.mark.parametrize(
    ("main", "ranks", "rows"),
    [
        (
            both_send,
            2,
            ["rank 0 waits in send", "for rank 1", "rank 1 waits in send", "for rank 0"],
        ),
        (both_receive, 2, ["rank 0 waits in recv float32[1] peer=1 tag 4", "for rank 0"]),
        (
            collective_against_message,
            2,
            ["rank 0 waits in all_reduce(sum) float32[1] of 'loss'", "rank 1 waits in recv"],
        ),
        (wrong_tags, 2, ["send float32[1] peer=1 tag 1", "recv float32[1] peer=0 tag 2"]),
        (one_returns, 2, ["rank 0 waits in barrier", "for rank 1", "rank 1 returned already"]),
        (
            three_in_a_circle,
            4,
            ["rank 0 waits in recv", "rank 1 waits", "rank 2 waits in recv", "for rank 0"],
        ),
        (
            across_subgroups,
            3,
            ["group 'world.1'", "group 'world.2'", "rank 2 waits in recv", "for rank 0"],
        ),
        (work_that_nobody_joins, 2, ["rank 0 waits in all_reduce", "rank 1 waits in recv"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_deadlock_is_seen_when_it_forms_and_shows_who_waits_for_whom(
    main: Main, ranks: int, rows: list[str]
) -> None:
    start_s = time.perf_counter()
    with pytest.raises(DeadlockError) as info:
        ec.run(main, ranks)
    assert time.perf_counter() - start_s < FAST_S
    text = str(info.value)
    assert all(row in text for row in rows), text
    assert f"{__file__}:" in text
    assert f"in {main.__name__}" in text


def test_every_rank_of_a_deadlock_gets_the_error() -> None:
    seen: list[str] = []

    def main(world: ec.World) -> None:
        try:
            three_in_a_circle(world)
            world.group.barrier()
        except DeadlockError as error:
            seen.append(str(error))
            raise

    with pytest.raises(DeadlockError):
        ec.run(main, 4)
    assert len(seen) == 4
    assert len(set(seen)) == 1


def test_a_rank_that_only_computes_for_long_is_no_deadlock() -> None:
    def main(world: ec.World) -> float:
        if world.rank == 1:
            time.sleep(0.3)
        total = one()
        world.group.all_reduce(total)
        return total.item()

    assert ec.run(main, 3) == [3.0] * 3


@pytest.mark.slow
def test_a_rank_may_communicate_from_several_threads() -> None:
    def main(world: ec.World) -> list[float]:
        groups = [world.group.subgroup(range(world.size)) for _ in range(4)]
        results = [0.0] * 4

        def background(number: int) -> None:
            for step in range(20):
                value = torch.tensor([float(number + step)])
                groups[number].all_reduce(value)
                results[number] += value.item()

        threads = [threading.Thread(target=background, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    expected = [3.0 * sum(number + step for step in range(20)) for number in range(4)]
    assert ec.run(main, 3) == [expected] * 3


def test_an_answer_from_another_thread_of_a_waiting_rank_is_no_deadlock() -> None:
    def main(world: ec.World) -> None:
        side = world.group.subgroup([0, 1])
        if world.rank == 0:
            server = threading.Thread(target=side.barrier)
            world.group.recv(one(), 1, tag=1)
            server.start()
            world.group.recv(one(), 1)  # waits for rank 1, which waits for the server
            server.join()
        else:
            world.group.send(one(), 0, tag=1)
            time.sleep(0.1)  # the server waits by now
            side.barrier()
            world.group.send(one(), 0)

    ec.run(main, 2)


@pytest.mark.parametrize("rules", [None, "nccl"])
def test_ranks_that_ask_in_a_loop_for_what_never_comes_end_when_time_is_up(
    rules: str | None,
) -> None:
    def main(world: ec.World) -> None:
        arrives = world.group.irecv(one(), 1 - world.rank)
        while not arrives.done():
            pass
        arrives.wait()

    start_s = time.perf_counter()
    with pytest.raises(CommTimeout, match=r"recv float32\[1\].*waited 0\.3 s for rank"):
        ec.run(main, 2, timeout=0.3, rules=rules)
    assert time.perf_counter() - start_s < 30.0  # a busy machine; 0.5 s on an idle one


def test_a_rank_may_ask_for_as_long_as_it_likes_while_ranks_communicate() -> None:
    def main(world: ec.World) -> int:
        steps, end_s = 0, time.monotonic() + 1.0
        arrives = world.group.irecv(one(), 1, tag=7) if world.rank == 0 else None
        while True:
            steps += 1
            goes_on = torch.tensor([time.monotonic() < end_s])
            world.group.broadcast(goes_on, 0)
            if not goes_on:
                break
            assert arrives is None or not arrives.done()
        if world.rank == 1:
            world.group.send(one(), 0, tag=7)
        elif arrives is not None:
            arrives.wait()
        return steps

    assert min(ec.run(main, 2, timeout=0.3)) > 1


def test_who_waits_with_a_timeout_of_its_own_gets_it_when_a_rank_returns() -> None:
    def main(world: ec.World) -> str:
        if world.rank == 1:
            return "returned"
        with pytest.raises(CommTimeout):
            world.group.irecv(torch.zeros(1), 1, tag=7).wait(timeout=0.2)
        return "went on"

    assert ec.run(main, 2) == ["went on", "returned"]
