"""Simulated ranks in both orders: in turns, and at the same time."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["turns", "concurrent"])
def concurrent(request: pytest.FixtureRequest) -> bool:
    """Whether the ranks of a test run at the same time."""
    flag: bool = request.param
    return flag
