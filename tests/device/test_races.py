"""No configuration of one rank has operations that race on a device."""

from __future__ import annotations

import pytest

from tests.device.compiler import needs_compiler
from tests.device.programs import PROGRAMS
from tests.device.waits import run

pytestmark = needs_compiler


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_configuration_has_a_race(name: str) -> None:
    report = run(PROGRAMS[name]).report()
    assert str(report) == "no races"
    # What is handed out after the end does not race, either.
    assert report.still_used == ()


def test_there_are_150_configurations() -> None:
    assert len(PROGRAMS) >= 150
