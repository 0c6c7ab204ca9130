from dataclasses import replace
from typing import Any

import pytest

import echelon as ec
from echelon.planner.device import Device, presets


@pytest.mark.parametrize("name", list(presets()))
def test_each_preset_is_possible_and_has_its_source(name: str) -> None:
    device = presets()[name]
    assert device.source
    assert device.attention <= device.matmul <= device.peak
    assert device.bus <= device.link <= device.bandwidth


def test_short_names_are_known() -> None:
    assert Device.preset("h100") is presets()["H100-SXM"]


@pytest.mark.parametrize("field", ["memory", "link", "bus", "bandwidth", "processors"])
def test_a_rate_of_zero_is_refused(field: str) -> None:
    with pytest.raises(ec.ArgumentError, match=f"{field} of device 'H100-SXM' is 0"):
        replace(Device.preset("H100"), **{field: 0})


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("attention", 5e-324, "attention of device 'H100-SXM' is 5e-324"),
        ("bandwidth", 1e300, "bandwidth of device 'H100-SXM' is 1e.300"),
        ("processors", 0.5, "processors of device 'H100-SXM' is 0.5; give a whole number"),
        ("name", 3, "name is 3; give a text"),
        ("name", "H100\ud800", "give characters that can be printed"),
        ("name", "H100\x1b[2J", "give characters that can be printed"),
    ],
)
def test_a_number_with_which_times_overflow_is_refused(
    field: str, value: object, sentence: str
) -> None:
    changed: Any = {field: value}
    with pytest.raises(ec.ArgumentError, match=sentence):
        replace(Device.preset("H100"), **changed)
