"""What the ends of all ranks mean for a job, and the lines that say so."""

import signal
from pathlib import Path
from typing import Any

import pytest

from echelon.diagnosis.failure_record import FailureRecord
from echelon.diagnosis.failure_report import MAX_LINES
from echelon.errors import RankFailed
from echelon.launch.attempt import Attempt, Outcome, failure_lines, leaving_line, restart_lines


def attempt(codes: dict[int, int], **facts: Any) -> Attempt:
    return Attempt(**{"number": 1, "most": 3, "codes": codes} | facts)


@pytest.mark.parametrize(
    ("facts", "outcome", "restarts", "code"),
    [
        ({"codes": {0: 0, 1: 0}}, Outcome.FINISHED, False, 0),
        # A signal that came too late to matter.
        ({"codes": {0: 0, 1: 0}, "stop": "SIGTERM"}, Outcome.FINISHED, False, 0),
        ({"codes": {0: 75, 1: 75}, "stop": "SIGUSR1"}, Outcome.RESUMABLE, False, 75),
        ({"codes": {0: 75, 1: 0}}, Outcome.RESUMABLE, False, 75),
        ({"codes": {0: -15, 1: -15}, "stop": "SIGTERM"}, Outcome.STOPPED, False, 143),
        ({"codes": {0: 75, 1: -9}, "stop": "SIGTERM"}, Outcome.STOPPED, False, 143),
        # It noticed that the other one was gone.
        ({"codes": {0: 1, 1: -2}, "stop": "SIGINT", "noticed": (0,)}, Outcome.STOPPED, False, 130),
        # The disk was full when it saved.
        ({"codes": {0: 75, 1: 1}, "stop": "SIGTERM", "raised": (1,)}, Outcome.FAILED, False, 1),
        ({"codes": {0: -9, 1: -15}}, Outcome.FAILED, True, 1),
        ({"codes": {0: -9, 1: -15}, "number": 3}, Outcome.FAILED, False, 1),
        ({"codes": {0: 1, 1: 3}, "noticed": (0,)}, Outcome.FAILED, True, 3),
        # One wants to go on later, so it is not started again now.
        ({"codes": {0: 75, 1: 2}}, Outcome.FAILED, False, 2),
        ({"codes": {0: 75, 1: -9}}, Outcome.FAILED, False, 1),
    ],
)
def test_how_ranks_end_says_what_becomes_of_the_job(
    facts: dict[str, Any], outcome: Outcome, restarts: bool, code: int
) -> None:
    one = attempt(**facts)
    assert (one.outcome, one.restarts, one.exit_code) == (outcome, restarts, code)


def test_attempts_are_read_as_they_were_written_and_an_unfinished_line_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "attempts"
    assert Attempt.read(path) == []
    first = attempt({0: -9, 11: 1}, signaled=(11,), killed=(0,), noticed=(11,))
    second = attempt({0: 75, 11: 75}, number=2, stop=signal.SIGUSR1.name, held_up=("rank 1",))
    first.append(path)
    assert Attempt.read(path) == [first]
    second.append(path)
    with open(path, "a") as file:
        file.write('{"number": 3, "mo')
    assert Attempt.read(path) == [first, second]


def only_attempt(codes: dict[int, int], **facts: Any) -> Attempt:
    return Attempt(**{"number": 1, "most": 1, "codes": codes} | facts)


def record(error: BaseException, rank: int) -> FailureRecord:
    return FailureRecord.of(error, rank)


def failure(one: Attempt, *records: FailureRecord) -> list[str]:
    return failure_lines(one, {r.rank: r for r in records}, {}, 5.0, ["the logs"])


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (
            only_attempt({0: 75, 1: 75}, stop="SIGTERM"),
            "SIGTERM: all ranks have left to go on later: the same command resumes (exit code 75)",
        ),
        (
            only_attempt({0: 75, 1: 0}),
            "all ranks have left to go on later: the same command resumes (exit code 75)",
        ),
        (only_attempt({0: -2, 1: -2}, stop="SIGINT"), "SIGINT: all ranks have ended"),
        (
            only_attempt({0: 75, 1: -15}, stop="SIGTERM"),
            "SIGTERM: all ranks have ended, only rank 0 with code 75",
        ),
        (
            only_attempt({0: 75, 1: -9}, stop="SIGTERM", killed=(1,)),
            "SIGTERM: rank 1 had not left after 5 s and was killed: what was not saved by then is "
            "lost",
        ),
        (
            only_attempt({0: -9, 1: -9}, stop="SIGINT", killed=(0, 1), hurried=True),
            "SIGINT: ranks 0, 1 had not left when it was asked again and were killed: what was not "
            "saved by then is lost",
        ),
    ],
)
def test_a_job_that_was_stopped_is_one_line(one: Attempt, line: str) -> None:
    assert leaving_line(one, 5.0) == line


def test_a_restart_is_two_lines_of_which_the_first_is_the_cause() -> None:
    one = only_attempt({0: -15, 1: -9}, most=3, signaled=(0,))
    lines = restart_lines(one, failure(one), Path("/tmp/logs"))
    assert lines == [
        "rank 1 was killed by SIGKILL",
        "attempt 2 of 3 begins: all ranks start again; the output of attempt 1 is in /tmp/logs",
    ]


def test_the_last_failure_counts_the_attempts() -> None:
    lines = failure(only_attempt({0: 0, 1: 4}, number=3, most=3))
    assert lines == ["rank 1 exited with code 4", "", "this was attempt 3 of 3", "the logs"]


def test_one_attempt_is_not_counted() -> None:
    assert failure(only_attempt({0: 0, 1: 4})) == ["rank 1 exited with code 4", "", "the logs"]


def test_a_rank_that_fails_while_it_saves_is_the_cause_and_the_signal_is_told() -> None:
    one = only_attempt({0: 75, 1: 1}, stop="SIGTERM", raised=(1,))
    lines = failure(one, record(OSError("no space left"), 1))
    assert lines[0] == "rank 1 raised OSError: no space left"
    assert "SIGTERM had asked the ranks to stop" in lines


@pytest.mark.parametrize(
    ("one", "records", "cause"),
    [
        # The others still needed it.
        (
            only_attempt({0: 75, 1: 1}, noticed=(1,)),
            [record(RankFailed(0, "left", "all_reduce #4"), 1)],
            "rank 0 exited with code 75",
        ),
        (only_attempt({0: 75, 1: 3}), [], "rank 1 exited with code 3"),
        (only_attempt({0: 75, 1: -11}), [], "rank 1 was killed by SIGSEGV"),
        (
            only_attempt({0: 75, 1: -9, 2: -9}, killed=(1, 2)),
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
    one = only_attempt(dict.fromkeys(range(64), 1), number=2, most=2, stop="SIGTERM")
    assert (
        len(failure(one, *(record(ValueError("\n" * 99), rank) for rank in range(64)))) <= MAX_LINES
    )
