"""Errors about calls and models say what is wrong, and where."""

from echelon.errors import (
    ModelMismatch,
    RankError,
)


def test_a_rank_error_says_which_ranks_there_are() -> None:
    assert str(RankError("dst", 7, 4)) == (
        "dst is 7, which is not in a group of 4 (need 0 <= rank < 4)"
    )


def test_a_model_mismatch_says_what_differs() -> None:
    text = str(ModelMismatch("the shape of 'w'", {0: "[2]", 1: "[3]"}))
    assert "the shape of 'w'" in text
    assert "rank 1: [3]" in text
