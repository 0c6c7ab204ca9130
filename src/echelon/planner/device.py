"""``Device``: a processor with memory and its rates; presets are data with their sources."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import final

from echelon.checks import instance, integer, number
from echelon.errors import ArgumentError

_GIGA, _TERA = 1e9, 1e12
MOST_BYTES = 1e30  # bytes or a rate; times of more would round to nothing
# What an allocator keeps besides what is allocated, and what the context of a device takes.
_RESERVED, _CONTEXT_BYTES = 0.08, 1.5e9
# Short names that people use, and the preset that they mean.
_ALSO = {
    "V100": "V100-SXM-32",
    "A100": "A100-SXM-80",
    "A100-40": "A100-SXM-40",
    "A100-80": "A100-SXM-80",
    "A800": "A800-SXM-80",
    "H100": "H100-SXM",
    "H800": "H800-SXM",
    "H200": "H200-SXM",
    "B200": "B200-SXM",
}


@final
@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: what it is called.
        memory: bytes.
        peak: dense FLOP/s with 16-bit inputs, as its maker prints it.
        matmul: FLOP/s of the best large multiplication of 16-bit matrices that was measured.
        attention: FLOP/s of fused attention in its forward.
        bandwidth: bytes/s of its memory.
        link: bytes/s one way to the other devices of its host.
        bus: bytes/s of the bus in an all-reduce among the devices of a host: what each rank sends,
            2 (n - 1) / n times the bytes, over the time.
        processors: multiprocessors, among which a multiplication is dealt in tiles.
        source: where the numbers are from.
    """

    name: str
    memory: float
    peak: float
    matmul: float
    attention: float
    bandwidth: float
    link: float
    bus: float
    processors: int
    source: str = ""

    def __post_init__(self) -> None:
        instance("name", self.name, str)
        instance("source", self.source, str)
        if not self.name.isprintable():
            raise ArgumentError(
                f"name of the device is {self.name!r:.80}; give characters that can be printed"
            )
        names = {field.name for field in fields(self)} - {"name", "source", "processors"}
        for field in sorted(names):
            number(f"{field} of device {self.name!r}", getattr(self, field), 1.0, MOST_BYTES)
        integer(f"processors of device {self.name!r}", self.processors, low=1)

    @property
    def usable_bytes(self) -> float:
        """What may be allocated: the memory without what the allocator reserves and the context."""
        return max(0.0, self.memory - _CONTEXT_BYTES) / (1 + _RESERVED)

    @classmethod
    def preset(cls, name: str) -> Device:
        """A known device by its name.

        Raises:
            ArgumentError: there is none of this name; the sentence has the names.

        Example:
            >>> Device.preset("A100").peak
            312000000000000.0
        """
        known = presets()
        device = known.get(_ALSO.get(name.upper(), name)) or known.get(name.upper())
        if device is None:
            names = ", ".join([*known, *(short for short in _ALSO if short not in known)])
            raise ArgumentError(
                f"device is {name!r:.80}, which is not known: give one of {names}, or a file of "
                "JSON that describes the cluster"
            )
        return device


@cache
def presets() -> Mapping[str, Device]:
    """The known devices by name."""
    text = resources.files("echelon.planner").joinpath("devices.csv").read_text("utf-8")
    return {row["name"]: _device(row) for row in csv.DictReader(text.splitlines())}


def _device(row: Mapping[str, str]) -> Device:
    return Device(
        name=row["name"],
        memory=float(row["memory_gb"]) * _GIGA,
        peak=float(row["peak_16bit"]) * _TERA,
        matmul=float(row["matmul_16bit"]) * _TERA,
        attention=float(row["attention_16bit"]) * _TERA,
        bandwidth=float(row["memory_tb_s"]) * _TERA,
        link=float(row["link_gb_s"]) * _GIGA,
        bus=float(row["bus_gb_s"]) * _GIGA,
        processors=int(row["processors"]),
        source=row["source"],
    )
