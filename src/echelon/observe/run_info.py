"""What a training script says of a run before its first step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from echelon import checks
from echelon.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The facts of a run that are known before its first step.

    Attributes:
        total_steps: the number of steps that are planned.
        unit: the unit of the loss, such as ``"nats"``.
        references: losses to compare with, by name; the page has a line for each.
        config: the options of the script, which the page shows.
        flops_per_token: the operations of a training step for each token, such as six for each
            parameter; the page then says how many a rank computes in a second.
        peak_flops: the most operations that a rank could do in a second, as its vendor says or as
            ``matmul_flops`` measures; the page then has the utilization.
    """

    total_steps: int
    unit: str = ""
    references: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    flops_per_token: float | None = None
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        checks.integer("total_steps", self.total_steps, low=1)
        checks.instance("unit", self.unit, str)
        checks.mapping("references", self.references)
        checks.mapping("config", self.config)
        for name in ("flops_per_token", "peak_flops"):
            value = getattr(self, name)
            if value is not None and not checks.number(name, value, 0.0, sys.float_info.max):
                raise ArgumentError(f"{name} is 0; leave it out where it is not known")
        if self.peak_flops is not None and self.flops_per_token is None:
            raise ArgumentError("peak_flops has no effect without flops_per_token: give both")
        for name, value in self.references.items():
            checks.number(f"the reference {name!r}", value, -sys.float_info.max)
