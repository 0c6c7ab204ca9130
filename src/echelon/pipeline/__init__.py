"""Pipelines: a model cut into stages, and schedules as data that are checked and simulated.

``schedule`` or ``Schedule.from_csv`` → ``check`` → ``simulate`` and ``choose`` → ``lower``.
Of what is here only ``split`` needs torch, which it imports when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from echelon.pipeline.check import check
from echelon.pipeline.choose import Choice, choose
from echelon.pipeline.ir import Action, Item, Kind, Pair, Schedule
from echelon.pipeline.measure import Measurement, measured_costs
from echelon.pipeline.page import to_page
from echelon.pipeline.partition import partition
from echelon.pipeline.passes import lower
from echelon.pipeline.readiness import Channel
from echelon.pipeline.render import to_svg, to_text
from echelon.pipeline.schedules import schedule
from echelon.pipeline.simulate import Idle, Simulation, simulate
from echelon.pipeline.timeline import Step, Timeline

if TYPE_CHECKING:
    from echelon.pipeline.split import split

__all__ = [
    "Action",
    "Channel",
    "Choice",
    "Idle",
    "Item",
    "Kind",
    "Measurement",
    "Pair",
    "Schedule",
    "Simulation",
    "Step",
    "Timeline",
    "check",
    "choose",
    "lower",
    "measured_costs",
    "partition",
    "schedule",
    "simulate",
    "split",
    "to_page",
    "to_svg",
    "to_text",
]

# Those that need torch, and where they live. A module of the same name must not hide its function,
# so the function is put in its place.
_LATE = {"split": "echelon.pipeline.split"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'echelon.pipeline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = value
    return value
