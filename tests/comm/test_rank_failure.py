import pytest

from echelon.comm.rank_failure import cause_of


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("boom"), "raised ValueError: boom"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt"),
        (SystemExit(3), "exited with code 3"),
        (SystemExit(256), "exited with code 0"),
        (SystemExit("no data"), "exited with code 1"),
    ],
)
def test_others_are_told_what_ended_a_rank(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause
