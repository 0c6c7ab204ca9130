import json
from dataclasses import replace
from pathlib import Path

import pytest

import echelon as ec
from echelon.planner.cluster import Cluster, HostMemory


def test_a_text_names_hosts_devices_and_the_rate_between_hosts() -> None:
    cluster = Cluster.parse("4x8 H100 @ 1600 Gb/s")
    assert (cluster.hosts, cluster.devices_per_host, cluster.device.name) == (4, 8, "H100-SXM")
    assert cluster.network == 200e9


def test_one_host_needs_no_number_of_hosts() -> None:
    assert Cluster.parse("8 A100").num_devices == 8


def test_a_file_describes_a_device_of_ones_own(tmp_path: Path) -> None:
    device = {
        "name": "mine", "memory": 1e9, "peak": 1e12, "matmul": 8e11,
        "attention": 5e11, "bandwidth": 1e10, "link": 1e9, "bus": 1e9, "processors": 10,
    }  # fmt: skip
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps({"hosts": 1, "devices_per_host": 2, "device": device, "network": 1e9})
    )
    assert Cluster.parse(str(path)).device.name == "mine"
    del device["bus"]
    path.write_text(
        json.dumps({"hosts": 1, "devices_per_host": 2, "device": device, "network": 1e9})
    )
    with pytest.raises(ec.ArgumentError, match="has no 'bus'"):
        Cluster.parse(str(path))


def test_a_file_may_have_a_price_and_nothing_else(tmp_path: Path) -> None:
    fields = {"hosts": 2, "devices_per_host": 8, "device": "A100", "network": 1e11}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({**fields, "price": 1.75}))
    assert Cluster.parse(str(path)).price == 1.75
    path.write_text(json.dumps(fields))
    assert Cluster.parse(str(path)).price is None
    for wrong in ({"price": 0}, {"price": "2"}, {"network": 0}, {"hosts": 0}, {"device": "H900"}):
        path.write_text(json.dumps({**fields, **wrong}))
        with pytest.raises(ec.ArgumentError, match=f"{next(iter(wrong))} is"):
            Cluster.parse(str(path))
    path.write_text(json.dumps({**fields, "colour": "red"}))
    with pytest.raises(ec.ArgumentError, match="must be an object with the fields"):
        Cluster.parse(str(path))


def test_a_file_may_describe_the_memory_of_a_host(tmp_path: Path) -> None:
    fields = {"hosts": 2, "devices_per_host": 8, "device": "A100", "network": 1e11}
    path = tmp_path / "cluster.json"
    host = {"memory": 2e12, "bandwidth": 4e11, "link": 25e9}
    path.write_text(json.dumps({**fields, "host": host}))
    assert Cluster.parse(str(path)).host == HostMemory(memory=2e12, bandwidth=4e11, link=25e9)
    path.write_text(json.dumps({**fields, "host": 5}))
    with pytest.raises(ec.ArgumentError, match="host is 5; give an object"):
        Cluster.parse(str(path))
    with pytest.raises(ec.ArgumentError, match="host is 5; give a HostMemory"):
        replace(Cluster.parse("8 A100"), host=5)
    with pytest.raises(ec.ArgumentError, match="device is 5; give a Device"):
        replace(Cluster.parse("8 A100"), device=5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("8x8 H900", "device is 'H900', which is not known"),
        ("many H100", "give hosts x devices and a device"),
        ("8x8 H100 @ 0 Gb/s", "network"),
        ("8x8 H100 @ 1.2.3 Gb/s", "give hosts x devices and a device"),
        ("0x8 H100", "hosts is 0; give a whole number >= 1"),
        ("9999999x8 H100", "hosts is 9999999; give a whole number <= 1048576"),
        ("1048576x8 H100", "devices_per_host is 8; give a whole number <= 1"),
        ("9" * 5000 + " H100", "give hosts x devices and a device"),
        ("nowhere.json", "cannot be read"),
    ],
)
def test_what_is_wrong_is_said(text: str, sentence: str) -> None:
    with pytest.raises(ec.ArgumentError, match=sentence):
        Cluster.parse(text)


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ec.ArgumentError, match="cannot be read"):
        Cluster.parse(str(path))
