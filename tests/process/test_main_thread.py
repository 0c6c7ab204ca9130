import threading
from collections.abc import Callable

import pytest

import echelon as ec
from echelon.process.main_thread import in_main_thread, serve, serving


def in_a_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def who_is_asked(world: ec.World) -> tuple[bool, list[str], list[str]]:
    """What has run in which thread, when a rank asks and waits, and when it only asks."""
    names: list[str] = []
    later: list[str] = []
    done = threading.Event()
    answer = in_main_thread(lambda: names.append(threading.current_thread().name))
    seen = list(names)
    in_main_thread(lambda: (later.append("later"), done.set()), wait=False)  # type: ignore[arg-type]
    assert done.wait(20)
    return answer, seen, later


@pytest.mark.slow
def test_the_main_thread_does_what_simulated_ranks_ask_of_it() -> None:
    assert ec.run(who_is_asked, 3) == [(True, ["MainThread"], ["later"])] * 3


def test_the_main_thread_asks_nobody() -> None:
    names: list[str] = []
    assert in_main_thread(lambda: names.append(threading.current_thread().name), wait=False)
    assert names == ["MainThread"]


def test_nobody_can_be_asked_while_the_main_thread_does_something_else() -> None:
    answers: list[bool] = []
    in_a_thread(lambda: answers.append(in_main_thread(lambda: answers.append(True)))).join()
    # Ranks that another thread waits for cannot ask it either.
    in_a_thread(
        lambda: answers.extend(ec.run(lambda world: in_main_thread(lambda: None), 2))
    ).join()
    assert answers == [False] * 3


def test_what_was_asked_last_is_done_before_the_main_thread_leaves() -> None:
    asked, done = threading.Event(), threading.Event()
    with serving():
        in_a_thread(lambda: (in_main_thread(done.set, wait=False), asked.set())).join()
        assert asked.is_set()
        assert not done.is_set()
    assert done.is_set()


def test_a_rank_that_asks_while_another_one_fails_is_not_left_waiting() -> None:
    failed = threading.Event()
    served: list[int] = []

    def main(world: ec.World) -> None:
        if world.rank == 0:
            failed.set()
            raise KeyError("boom")
        failed.wait()
        in_main_thread(lambda: served.append(world.rank))

    with pytest.raises(KeyError, match="boom") as info:
        ec.run(main, 3)
    assert info.value.__notes__ == ["raised on rank 0 of 3"]  # and nobody was left behind
    assert sorted(served) == [1, 2]


def test_another_thread_than_the_main_one_serves_nobody() -> None:
    done = threading.Event()
    with serving():
        in_a_thread(lambda: in_main_thread(done.set, wait=False)).join()
        in_a_thread(serve).join()
        assert not done.is_set()
        serve()
        assert done.is_set()


def test_whoever_waits_is_freed_where_a_call_before_is_interrupted() -> None:
    answers: list[bool] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    def ask() -> None:
        in_main_thread(interrupted, wait=False)
        answers.append(in_main_thread(lambda: None))

    with pytest.raises(KeyboardInterrupt), serving():
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(0.5)  # it waits, and nobody serves until the end
    asking.join(30.0)
    assert answers == [False]
