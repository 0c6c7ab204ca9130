from pathlib import Path
from typing import Any

import pytest

from echelon.diagnosis.failure_record import FailureRecord
from echelon.errors import RankFailed
from echelon.launch.attempt import Attempt
from echelon.launch.endings import failure_lines, leaving_line, restart_lines
from echelon.launch.failure_text import MAX_LINES


def attempt(codes: dict[int, int], **facts: Any) -> Attempt:
    return Attempt(**{"number": 1, "most": 1, "codes": codes} | facts)


def record(error: BaseException, rank: int) -> FailureRecord:
    return FailureRecord.of(error, rank)


def failure(one: Attempt, *records: FailureRecord) -> list[str]:
    return failure_lines(one, {r.rank: r for r in records}, {}, 5.0, ["the logs"])


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (
            attempt({0: 75, 1: 75}, stop="SIGTERM"),
            "SIGTERM: all ranks have left to go on later: the same command resumes (exit code 75)",
        ),
        (
            attempt({0: 75, 1: 0}),
            "all ranks have left to go on later: the same command resumes (exit code 75)",
        ),
        (attempt({0: -2, 1: -2}, stop="SIGINT"), "SIGINT: all ranks have ended"),
        (
            attempt({0: 75, 1: -15}, stop="SIGTERM"),
            "SIGTERM: all ranks have ended, only rank 0 with code 75",
        ),
        (
            attempt({0: 75, 1: -9}, stop="SIGTERM", killed=(1,)),
            "SIGTERM: rank 1 had not left after 5 s and was killed: what was not saved by then is "
            "lost",
        ),
        (
            attempt({0: -9, 1: -9}, stop="SIGINT", killed=(0, 1), hurried=True),
            "SIGINT: ranks 0, 1 had not left when it was asked again and were killed: what was not "
            "saved by then is lost",
        ),
    ],
)
def test_a_job_that_was_stopped_is_one_line(one: Attempt, line: str) -> None:
    assert leaving_line(one, 5.0) == line


def test_a_restart_is_two_lines_of_which_the_first_is_the_cause() -> None:
    one = attempt({0: -15, 1: -9}, most=3, told=(0,))
    lines = restart_lines(one, failure(one), Path("/tmp/logs"))
    assert lines == [
        "rank 1 was killed by SIGKILL",
        "attempt 2 of 3 begins: all ranks start again; the output of attempt 1 is in /tmp/logs",
    ]


def test_the_last_failure_counts_the_attempts() -> None:
    lines = failure(attempt({0: 0, 1: 4}, number=3, most=3))
    assert lines == ["rank 1 exited with code 4", "", "this was attempt 3 of 3", "the logs"]


def test_one_attempt_is_not_counted() -> None:
    assert failure(attempt({0: 0, 1: 4})) == ["rank 1 exited with code 4", "", "the logs"]


def test_a_rank_that_fails_while_it_saves_is_the_cause_and_the_signal_is_told() -> None:
    one = attempt({0: 75, 1: 1}, stop="SIGTERM", raised=(1,))
    lines = failure(one, record(OSError("no space left"), 1))
    assert lines[0] == "rank 1 raised OSError: no space left"
    assert "SIGTERM had asked the ranks to stop" in lines


@pytest.mark.parametrize(
    ("one", "records", "cause"),
    [
        # The others still needed it.
        (
            attempt({0: 75, 1: 1}, noticed=(1,)),
            [record(RankFailed(0, "left", "all_reduce #4"), 1)],
            "rank 0 exited with code 75",
        ),
        (attempt({0: 75, 1: 3}), [], "rank 1 exited with code 3"),
        (attempt({0: 75, 1: -11}), [], "rank 1 was killed by SIGSEGV"),
        (
            attempt({0: 75, 1: -9, 2: -9}, killed=(1, 2)),
            [],
            "ranks 1, 2 had not left 5 s after rank 0 did with exit code 75, and were killed",
        ),
    ],
)
def test_a_rank_that_leaves_to_go_on_later_is_the_cause_only_if_there_is_no_other(
    one: Attempt, records: list[FailureRecord], cause: str
) -> None:
    assert failure(one, *records)[0] == cause


def test_no_text_is_longer_than_its_limit() -> None:
    one = attempt(dict.fromkeys(range(64), 1), number=2, most=2, stop="SIGTERM")
    assert (
        len(failure(one, *(record(ValueError("\n" * 99), rank) for rank in range(64)))) <= MAX_LINES
    )
