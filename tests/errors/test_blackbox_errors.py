"""Errors about kept steps say what was kept and what differs, and hide what a terminal obeys."""

import pickle

from echelon.errors import BlackboxError, ReplayMismatch, StepNotKept


def test_ranges_are_listed() -> None:
    error = StepNotKept("step 9 was not kept", "runs/a", step=9, kept=[(1, 4), (7, 7)])
    assert str(error) == ("runs/a: step 9 was not kept. Steps that can be replayed: 1 to 4, 7")
    assert (error.step, error.kept) == (9, ((1, 4), (7, 7)))


def test_differences_are_rows() -> None:
    error = ReplayMismatch("runs/a", {"torch": ("1.0", "2.0"), "x.py": ("ab", "\x1b[31m\ncd")})
    assert str(error).split("\n")[1:3] == [
        "  torch: 1.0 in the run, 2.0 here",
        "  x.py: ab in the run, \\x1b[31m\\ncd here",
    ]
    assert error.differing["torch"] == ("1.0", "2.0")


def test_names_of_others_are_made_harmless_and_errors_can_be_sent() -> None:
    error = BlackboxError("has \x1b", "a\nb")
    assert str(error) == "a\\nb: has \\x1b"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
