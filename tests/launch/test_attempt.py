import signal
from pathlib import Path
from typing import Any

import pytest

from echelon.launch.attempt import Attempt, Outcome


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
    assert Attempt.read(tmp_path) == []
    first = attempt({0: -9, 11: 1}, told=(11,), killed=(0,), noticed=(11,))
    second = attempt({0: 75, 11: 75}, number=2, stop=signal.SIGUSR1.name, hurried=True)
    first.append(tmp_path)
    assert Attempt.read(tmp_path) == [first]
    second.append(tmp_path)
    with open(tmp_path / "attempts.jsonl", "a") as file:
        file.write('{"number": 3, "mo')
    assert Attempt.read(tmp_path) == [first, second]
