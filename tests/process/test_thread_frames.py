"""The frames of threads are listed while nothing collects garbage."""

import gc
import sys
import threading

import pytest

from echelon.process.thread_frames import current_frames


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_frames_are_listed(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    """Python would hang then if a thread starts meanwhile (CPython's issue 106883)."""
    frames, enabled = sys._current_frames, list[bool]()

    def listed() -> dict[int, object]:
        enabled.append(gc.isenabled())
        return dict(frames())

    monkeypatch.setattr(sys, "_current_frames", listed)
    if not collects:
        gc.disable()
    try:
        assert threading.get_ident() in current_frames()
        assert (enabled, gc.isenabled()) == ([False], collects)
    finally:
        gc.enable()
