"""``Cluster``: hosts of equal devices, their memory, and the network between them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self, final

from echelon.checks import instance, integer, number, positive
from echelon.errors import ArgumentError
from echelon.planner.device import MOST_BYTES, Device
from echelon.process.plain_file import read_plain

_FORM = re.compile(
    r"(?:(\d{1,15})\s*[x×]\s*)?(\d{1,15})\s*[x×]?\s+(\S+)(?:\s*@\s*(\d+(?:\.\d+)?)\s*Gb/s)?"
)
_MAX_NBYTES = 1 << 24
MOST_DEVICES = 2**20
_USUAL_GBIT = {"V100": 400.0, "A100": 1600.0, "A800": 800.0, "MI300X": 3200.0}


@final
@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The memory of a host beside its devices, for states that are offloaded.

    Attributes:
        memory: bytes.
        bandwidth: bytes/s, of all its processors together.
        link: bytes/s one way between it and each device, all devices at the same time.
    """

    memory: float
    bandwidth: float
    link: float

    def __post_init__(self) -> None:
        for field in fields(self):
            number(f"{field.name} of host", getattr(self, field.name), 1.0, MOST_BYTES)

    @classmethod
    def of(cls, value: Any) -> Self:
        """That of an object of JSON with the fields of this class.

        Example:
            >>> HostMemory.of({"memory": 2e12, "bandwidth": 6e11, "link": 6e10}).link
            60000000000.0
        """
        needed, _ = _fields_of(cls)
        if not isinstance(value, Mapping) or set(value) != set(needed):
            raise ArgumentError(
                f"host is {value!r:.80}; give an object with the fields {', '.join(needed)}"
            )
        return cls(**value)


@final
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts, each with as many devices.

    Attributes:
        hosts: number of hosts.
        devices_per_host: number of devices in each.
        device: what they are.
        network: bytes/s one way between a host and the others, all its network cards together.
        price: of one device for an hour, in any currency; None: not known.
        host: the memory of each host; None: not known, and nothing is offloaded.
    """

    hosts: int
    devices_per_host: int
    device: Device
    network: float
    price: float | None = None
    host: HostMemory | None = None

    def __post_init__(self) -> None:
        integer("hosts", self.hosts, low=1, high=MOST_DEVICES)
        integer("devices_per_host", self.devices_per_host, low=1, high=MOST_DEVICES // self.hosts)
        instance("device", self.device, Device)
        number("network", self.network, 1.0, MOST_BYTES)
        if self.price is not None:
            positive("price", self.price)
        instance("host", self.host, HostMemory, or_none=True)

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.hosts * self.devices_per_host

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """The cluster of a text or of a file of JSON.

        Args:
            text: hosts x devices and a known device, such as ``8x8 H100``, with the rate between
                hosts where it is not the usual one: ``8x8 A100 @ 800 Gb/s``; or the path of a JSON
                file with the fields of this class, of which ``device`` is a name or an object with
                the fields of ``Device``.

        Raises:
            ArgumentError: the text has another form, the device is unknown, or a number is wrong.

        Example:
            >>> cluster = Cluster.parse("2x8 A100 @ 800 Gb/s")
            >>> cluster.num_devices, cluster.network
            (16, 100000000000.0)
        """
        if text.endswith(".json"):
            return cls._of_file(Path(text))
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ArgumentError(
                f"cluster is {text!r:.80}: give hosts x devices and a device, such as '8x8 H100' "
                "or '2x8 A100 @ 800 Gb/s', or the path of a JSON file"
            )
        hosts, devices, name, gbit = match.groups()
        device = Device.preset(name)
        usual = _USUAL_GBIT.get(device.name.split("-")[0], 3200.0)
        rate = float(gbit) if gbit else usual * int(devices) / 8
        return cls(
            hosts=int(hosts or 1),
            devices_per_host=int(devices),
            device=device,
            network=rate * 1e9 / 8,
        )

    @classmethod
    def _of_file(cls, path: Path) -> Cluster:
        try:
            value = json.loads(read_plain(path, _MAX_NBYTES, follows=True))
        except (OSError, ValueError, RecursionError) as error:
            raise ArgumentError(f"cluster {str(path)!r:.200} cannot be read: {error}") from error
        needed, optional = _fields_of(cls)
        if not isinstance(value, Mapping) or {*value, *optional} != {*needed, *optional}:
            raise ArgumentError(
                f"cluster {str(path)!r:.200} must be an object with the fields "
                f"{', '.join(needed)}, and may have {' and '.join(optional)}"
            )
        values: dict[str, Any] = dict(value)
        if values.get("host") is not None:
            values["host"] = HostMemory.of(values["host"])
        device = values.pop("device")
        if isinstance(device, str):
            return cls(device=Device.preset(device), **values)
        needed, optional = _fields_of(Device)
        if not isinstance(device, Mapping) or set(device) - {*needed, *optional}:
            raise ArgumentError(
                f"device in {str(path)!r:.200} must be the name of a known one or an object with "
                f"the fields {', '.join(sorted([*needed, *optional]))}"
            )
        for name in needed:
            if name not in device:
                raise ArgumentError(f"device in {str(path)!r:.200} has no {name!r}")
        return cls(device=Device(**device), **values)


def _fields_of(cls: type[Any]) -> tuple[list[str], list[str]]:
    """The fields that an object of JSON must have, sorted, and those that it may have."""
    optional = [field.name for field in fields(cls) if field.default is not MISSING]
    return sorted({field.name for field in fields(cls)} - {*optional}), optional
