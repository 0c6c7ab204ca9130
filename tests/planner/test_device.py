from dataclasses import replace

import pytest

import echelon as ec
from echelon.planner.device import Device, presets


@pytest.mark.parametrize("name", list(presets()))
def test_each_preset_is_possible_and_has_its_source(name: str) -> None:
    device = presets()[name]
    assert device.source
    assert device.attention <= device.matmul <= device.peak <= device.peak_8bit
    assert device.bus <= device.link <= device.bandwidth


def test_short_names_are_known() -> None:
    assert Device.preset("h100") is presets()["H100-SXM"]


@pytest.mark.parametrize("field", ["memory", "link", "bus", "bandwidth", "processors"])
def test_a_rate_of_zero_is_refused(field: str) -> None:
    with pytest.raises(ec.ArgumentError, match=f"{field} of device 'H100-SXM' is 0"):
        replace(Device.preset("H100"), **{field: 0})
