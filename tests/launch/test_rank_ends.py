"""What the ends of simulated ranks mean for their job."""

import pytest

from echelon.errors import RankFailed
from echelon.launch.attempt import Outcome
from echelon.launch.rank_ends import RankEnd, attempt_of, is_own_end


def ends_with(*errors: BaseException | None) -> list[RankEnd]:
    """The ends of as many ranks."""
    return [RankEnd.of(rank, 4, "barrier (#2)", error) for rank, error in enumerate(errors)]


def test_an_exit_has_the_code_and_the_text_of_a_process_and_no_record() -> None:
    [end] = ends_with(SystemExit("no data"))
    assert (end.code, end.log, end.record) == (1, "no data", None)
    assert (end.status.where, end.status.call) == ("at step 4", "barrier (#2)")


def test_an_exception_has_a_record() -> None:
    [end] = ends_with(ValueError("boom"))
    assert end.record is not None
    assert (end.code, end.record.headline) == (1, "rank 0 at step 4 raised ValueError: boom")


LOST = RankFailed(1, "exited with code 3", "barrier")


@pytest.mark.parametrize(
    ("errors", "is_own", "code"),
    [
        ((SystemExit(2), SystemExit(2)), True, 2),
        ((SystemExit("a"), SystemExit("b")), True, 1),
        ((SystemExit(75), None), True, 75),
        ((SystemExit(0), SystemExit(256)), True, 0),
        ((SystemExit(2), SystemExit(3)), False, 2),
        ((None, SystemExit(3)), False, 3),
        ((LOST, SystemExit(3)), False, 3),
        ((LOST, SystemExit(0)), False, 1),
        ((LOST, SystemExit(75)), False, 1),
        ((SystemExit(1), ValueError("boom")), False, 1),
    ],
)
def test_a_program_ends_by_itself_where_no_rank_was_cut_off_and_all_agree(
    errors: tuple[BaseException | None, ...], is_own: bool, code: int
) -> None:
    attempt = attempt_of(ends_with(*errors), 2)
    assert (is_own_end(attempt), attempt.exit_code) == (is_own, code)


def test_a_rank_whose_end_is_not_known_was_left_behind() -> None:
    attempt = attempt_of(ends_with(SystemExit(75)), 2)
    assert (attempt.outcome, attempt.signaled, attempt.exit_code) == (Outcome.FAILED, (1,), 1)
    assert not is_own_end(attempt)
