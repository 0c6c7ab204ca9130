"""Fixtures of the laboratory's tests."""

import bdb
from collections.abc import Iterator

import pytest

from tests.laboratory.typed_commands import Typist


@pytest.fixture
def typist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typist:
    """A user of the debugger of ranks."""
    return Typist(monkeypatch, capsys)


@pytest.fixture
def no_breakpoints() -> Iterator[None]:
    """Remove what ``b`` has set, which pdb keeps as long as the process lives."""
    yield
    for each in bdb.Breakpoint.bpbynumber:
        if each:
            each.deleteMe()
