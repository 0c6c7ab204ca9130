"""Limits of the tests that start jobs of other libraries."""

from pathlib import Path

import pytest

# Such a test runs up to seven jobs, each of which imports torch and a trainer on each rank.
TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder that name no limit a longer one than others have."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
