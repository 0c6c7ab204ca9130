"""The debugger that a package above offers to those below."""

import sys
from types import FrameType

import pytest

from echelon.process import offered_debugger


def test_the_debugger_that_was_offered_last_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[FrameType, str | None]] = []
    monkeypatch.setattr(offered_debugger, "_offered", list(offered_debugger._offered))
    offered_debugger.offer_debugger(lambda frame, header: opened.append((frame, header)))
    frame = sys._getframe()
    offered_debugger.open_debugger(frame, "here")
    assert opened == [(frame, "here")]
