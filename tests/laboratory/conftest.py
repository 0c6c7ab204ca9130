"""Fixtures of the laboratory's tests."""

import pytest

from tests.laboratory.typed_commands import Typist


@pytest.fixture
def typist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typist:
    """A user of the debugger of ranks."""
    return Typist(monkeypatch, capsys)
