"""Pipelines: a model cut into stages, and schedules as data that are checked and simulated.

``schedule`` or ``Schedule.from_csv`` → ``check`` → ``simulate`` and ``choose`` → ``lower``.
Nothing here needs torch.
"""

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
    "to_page",
    "to_svg",
    "to_text",
]
