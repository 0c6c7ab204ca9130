"""Pipelines: a model cut into stages, and schedules as data that are checked and simulated.

``schedule`` or ``Schedule.from_csv`` → ``check`` → ``simulate`` and ``choose`` → ``lower``.
Of what is here only ``split`` needs torch, which it imports when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from echelon.pipeline.measure import Measurement, measured_costs
from echelon.pipeline.schedule.check import check
from echelon.pipeline.schedule.choose import Choice, choose
from echelon.pipeline.schedule.ir import Action, Item, Kind, Pair, Schedule
from echelon.pipeline.schedule.page import to_page
from echelon.pipeline.schedule.passes import lower
from echelon.pipeline.schedule.readiness import Channel
from echelon.pipeline.schedule.render import to_svg, to_text
from echelon.pipeline.schedule.schedules import schedule
from echelon.pipeline.schedule.simulate import Idle, Simulation, simulate
from echelon.pipeline.schedule.timeline import Step, Timeline
from echelon.pipeline.split.partition import partition

if TYPE_CHECKING:
    from echelon.pipeline.split.splitting import split

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

# Those that need torch, and where they live: in no module of the same name, which would hide them.
_LATE = {"split": "echelon.pipeline.split.splitting"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'echelon.pipeline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = value
    return value
