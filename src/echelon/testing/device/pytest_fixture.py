"""A fixture for tests of programs with streams: ``pytest_plugins`` names this module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from echelon.testing.device.cuda_names import served_cuda
from echelon.testing.device.simulated import SimulatedDevice
from echelon.testing.device.simulated import simulated_device as _simulated_device


@pytest.fixture
def simulated_device() -> Iterator[SimulatedDevice]:
    """A device for the test, named ``"cuda"`` or ``"sim"``; the test fails if something races."""
    with _simulated_device() as device, served_cuda():
        yield device
    if report := device.report():
        pytest.fail(str(report), pytrace=False)
