"""``HostMemory``: the memory of a host beside its devices, for states that are offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, final

from echelon.checks import number
from echelon.errors import ArgumentError
from echelon.planner.device import MOST_BYTES


@final
@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The memory of a host.

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
        known = {field.name for field in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != known:
            raise ArgumentError(
                f"host is {value!r:.80}; give an object with the fields {', '.join(sorted(known))}"
            )
        return cls(**value)
