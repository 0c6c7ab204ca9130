"""Errors of checkpoints name the rank, the file and the tensor, and escape names of others."""

from echelon.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch


def test_an_error_that_is_told_of_another_rank_keeps_its_facts_and_its_cause() -> None:
    error = CheckpointCorrupt("the checksum differs", "runs/a/x", tensor="model/w")
    error.__cause__ = OSError("disk")
    copy = error.on_rank(3)
    assert str(copy) == "rank 3: runs/a/x: 'model/w': the checksum differs"
    assert (type(copy), copy.rank, copy.tensor, copy.path) == (
        CheckpointCorrupt, 3, "model/w", "runs/a/x",
    )  # fmt: skip
    assert copy.__cause__ is error.__cause__
    assert error.rank is None


def test_a_path_that_a_terminal_would_obey_is_escaped() -> None:
    assert "\x1b" not in str(CheckpointError("no", "runs/\x1b[2J"))


def test_a_mismatch_lists_a_dozen_names_and_counts_the_rest() -> None:
    error = CheckpointMismatch("runs/a", [f"w{i}" for i in range(20)], [], {"u": "(2,)"})
    assert str(error).count("  missing: ") == 12
    assert "  and 9 more" in str(error)
    assert "strict=False" in str(error)
