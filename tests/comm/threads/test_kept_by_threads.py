"""Threads that ranks start keep what was theirs in the turn of the rank."""

import threading

import echelon as ec
from echelon.comm.threads.kept_by_threads import keep, kept


def test_threads_keep_what_their_rank_had_and_pass_it_on_and_others_keep_nothing() -> None:
    numbers: list[tuple[int, int]] = []
    forget = keep("number", lambda: current[0])
    current = [0]

    def in_thread(action: object) -> None:
        assert callable(action)
        thread = threading.Thread(target=action)
        thread.start()
        thread.join()

    def main(world: ec.World) -> None:
        current[0] = world.rank * 10
        inner = lambda: numbers.append((world.rank, kept("number")))  # noqa: E731
        in_thread(lambda: in_thread(inner))
        assert kept("number") is None

    before = threading.Thread.start
    try:
        ec.run(main, 3)
    finally:
        forget()
    assert numbers == [(0, 0), (1, 10), (2, 20)]
    assert threading.Thread.start is before
    in_thread(lambda: numbers.append((-1, kept("number") or 0)))
    assert numbers[-1] == (-1, 0)
