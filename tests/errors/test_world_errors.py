"""Errors of worlds and communication name the ranks, what they did, and what to do."""

from echelon.errors import (
    CollectiveMismatch,
    CommTimeout,
    DeadlockError,
    RankFailed,
    SharedMemoryError,
)


def test_a_mismatch_marks_the_rank_that_differs() -> None:
    error = CollectiveMismatch("world", 3, {2: "barrier", 0: "barrier", 1: "broadcast"})
    assert str(error).splitlines() == [
        "collective #3 of group 'world' differs between ranks:",
        "  rank 0: barrier",
        "  rank 1: broadcast   <-- differs",
        "  rank 2: barrier",
        "All ranks of a group must issue the same collectives in the same order.",
    ]
    assert error.calls == {0: "barrier", 1: "broadcast", 2: "barrier"}


def test_a_mismatch_marks_no_rank_for_the_line_of_its_call() -> None:
    calls = {0: "barrier at a.py:1 in f", 1: "barrier at a.py:2 in f", 2: "send at a.py:3 in f"}
    marked = [
        line for line in str(CollectiveMismatch("world", 3, calls)).splitlines() if "<--" in line
    ]
    assert marked == ["  rank 2: send at a.py:3 in f   <-- differs"]


def test_too_little_memory_says_what_is_needed_and_what_there_is() -> None:
    error = SharedMemoryError("a window", 3 * 2**20, 2**20)
    assert "a window needs 3.0 MiB of shared memory and 1.0 MiB are available" in str(error)
    assert (error.needed, error.available) == (3 * 2**20, 2**20)


def test_a_failed_rank_is_named_with_its_cause_and_what_we_did() -> None:
    error = RankFailed(2, "raised KeyError: 'x'", "barrier")
    assert str(error) == "rank 2 raised KeyError: 'x', while this rank was in barrier"
    assert error.failed_rank == 2


def test_a_deadlock_shows_who_waits_for_whom_and_who_is_gone() -> None:
    error = DeadlockError({1: ("recv", [0]), 0: ("barrier", [1, 2])}, finished=[3, 2])
    assert str(error).splitlines() == [
        "deadlock: no rank can go on",
        "  rank 0 waits in barrier for ranks 1, 2",
        "  rank 1 waits in recv for rank 0",
        "  ranks 2, 3 returned already",
    ]


def test_a_timeout_names_whom_it_waited_for() -> None:
    assert str(CommTimeout("barrier", [1], 0.5)) == "barrier waited 0.5 s for rank 1 in vain"
    many = str(CommTimeout("barrier", range(100), 2))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, … in vain" in many
    assert str(CommTimeout("barrier", [], 1, "  rank 2 is busy")).endswith(
        "for other ranks in vain\n  rank 2 is busy"
    )
