"""Every public name stays, with its parameters, members and fields.

A line of ``tests/golden/public_api.txt`` that is missing or differs is a program of a user that no
longer runs. New names may be added at any time; add the lines that ``python -m tests.public_api``
prints of them.
"""

from collections import Counter
from pathlib import Path

from tests import public_api

GOLDEN = Path(__file__).parent / "golden" / "public_api.txt"


def broken(before: list[str], now: list[str]) -> list[str]:
    """The lines that stand no more."""
    return list(Counter(before) - Counter(now))


def test_every_public_name_is_there_with_its_parameters_members_and_fields() -> None:
    assert broken(GOLDEN.read_text().splitlines(), public_api.lines()) == []


def test_a_line_that_is_gone_or_differs_is_named() -> None:
    before = ["a.run(fn)", "a.run.x field", "a.save(path)"]
    assert broken(before, ["a.run(fn, ranks)", "a.run.x field"]) == ["a.run(fn)", "a.save(path)"]
    assert broken(before, [*before, "a.load(path)"]) == []
