"""Pipelines: a model cut into stages, and schedules as data that are checked and simulated.

``schedule`` or ``Schedule.from_csv`` → ``check`` → ``simulate`` and ``choose`` → ``lower``.
Nothing here needs torch.
"""

from echelon.pipeline.check import check
from echelon.pipeline.ir import Action, Item, Kind, Pair, Schedule
from echelon.pipeline.readiness import Channel
from echelon.pipeline.schedules import schedule
from echelon.pipeline.simulate import Idle, Simulation, simulate
from echelon.pipeline.timeline import Step, Timeline

__all__ = [
    "Action",
    "Channel",
    "Idle",
    "Item",
    "Kind",
    "Pair",
    "Schedule",
    "Simulation",
    "Step",
    "Timeline",
    "check",
    "schedule",
    "simulate",
]
