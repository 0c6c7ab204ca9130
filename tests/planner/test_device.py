import pytest

from echelon.planner.device import Device, presets


@pytest.mark.parametrize("name", list(presets()))
def test_each_preset_is_possible_and_has_its_source(name: str) -> None:
    device = presets()[name]
    assert device.source
    assert device.attention <= device.matmul <= device.peak <= device.peak_8bit
    assert device.bus <= device.link <= device.bandwidth


def test_short_names_are_known() -> None:
    assert Device.preset("h100") is presets()["H100-SXM"]
