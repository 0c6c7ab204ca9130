"""Every public name stays, with its parameters, members and fields, or keeps an alias that warns.

``tests/golden/public_api.txt`` is what `tests.public_api` printed at commit 3e1ed13. A line that is
missing or differs is a program of a user that no longer runs. New names may be added at any time;
add their lines when they are released.
"""

import importlib
import warnings
from collections import Counter
from pathlib import Path

import pytest

from tests import public_api

GOLDEN = Path(__file__).parent / "golden" / "public_api.txt"

# Public names that have a better one now: the old dotted name, and the new one that it gives. To
# use the old one warns (DeprecationWarning) for one version.
ALIASES: dict[str, str] = {}

# What only other packages of echelon used and no page of docs/ names: it changed without an alias,
# each with the reason.
INTERNAL: dict[str, str] = {}


def promised() -> list[str]:
    """The lines of the golden file."""
    return GOLDEN.read_text().splitlines()


def is_about(line: str, name: str) -> bool:
    """Whether a line promises a name or something of it."""
    return line.startswith(name) and line[len(name) : len(name) + 1] in {"", " ", "(", "."}


def broken(before: list[str], now: list[str], renamed: set[str]) -> list[str]:
    """The lines that stand no more, but for those about a name that is renamed."""
    left = Counter(before) - Counter(now)
    return [line for line in left if not any(is_about(line, name) for name in renamed)]


@pytest.fixture(scope="module")
def now() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return public_api.lines()


def test_every_public_name_is_there_with_its_parameters_members_and_fields(now: list[str]) -> None:
    assert broken(promised(), now, {*ALIASES, *INTERNAL}) == []


def test_an_alias_gives_the_new_name_and_warns() -> None:
    for old, new in ALIASES.items():
        owner, name = old.rsplit(".", 1)
        new_owner, new_name = new.rsplit(".", 1)
        expected = getattr(importlib.import_module(new_owner), new_name)
        with pytest.warns(DeprecationWarning, match=new_name):
            assert getattr(importlib.import_module(owner), name) is expected


def test_what_is_listed_as_changed_was_promised_and_has_changed(now: list[str]) -> None:
    for name in (*ALIASES, *INTERNAL):
        assert any(is_about(line, name) for line in promised()), f"nobody promised {name}"
        assert broken([line for line in promised() if is_about(line, name)], now, set()), name


def test_a_line_that_is_gone_or_differs_is_named() -> None:
    before = ["a.run(fn)", "a.run.x field", "a.save(path)"]
    assert broken(before, ["a.run(fn, ranks)", "a.run.x field"], set()) == [
        "a.run(fn)",
        "a.save(path)",
    ]
    assert broken(before, ["a.runs()", "a.save(path)"], {"a.run"}) == []
    assert broken(before, [*before, "a.load(path)"], set()) == []
