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


def test_a_mismatch_counts_names_of_each_kind_lists_some_of_each_and_says_what_to_do() -> None:
    missing = [f"w{i}" for i in range(20)]
    lines = str(CheckpointMismatch("runs/a", missing, ["v", "x"], {"u": "(2,)"})).split("\n")
    assert "(20 missing, 2 unexpected, 1 differing)" in lines[0]
    assert [line.strip() for line in lines[1:-1]] == [
        "missing: w0", "missing: w1", "missing: w2", "unexpected: v", "unexpected: x", "u: (2,)",
        "and 17 more",
    ]  # fmt: skip
    assert "strict=False" in lines[-1]


def test_a_mismatch_by_a_prefix_names_it() -> None:
    there = ["ema/module.0.weight", "ema/module.0.bias", "ema/n_averaged"]
    text = str(CheckpointMismatch("runs/a", ["ema/0.weight", "ema/0.bias"], there, {}))
    assert "begin with 'module.'" in text
    assert "torch.nn.ModuleDict({'module': model})" in text


def test_names_that_only_end_alike_are_no_prefix() -> None:
    text = str(CheckpointMismatch("runs/a", ["a.weight", "a.bias"], ["x.a.weight"], {}))
    assert "begin with" not in text
