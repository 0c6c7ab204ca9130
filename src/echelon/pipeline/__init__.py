"""Pipelines: a model cut into stages, and schedules as data that are checked and simulated.

``schedule`` or ``Schedule.from_csv`` → ``check`` → ``simulate`` and ``choose`` → ``lower``.
``judge`` says of a schedule that anybody wrote whether it can run.
Of the names here ``split`` and the specs of chunks import torch when they are first used, and
nothing that trains imports ``judge``.

``schedules``             which rank does what in which order, as data without torch
``splitting``             cuts a model into stages
``api``                   ``Pipeline``
``arguments``             checks its arguments, and that all ranks have the same
``execute``               runs the actions of a rank; start reading here
``stage``                 one stage: forward, backward, and the two halves of a backward
``recomputed_buffers``    buffers of a stage whose forward runs again in backward
``weight_gradients``      gradients of large weights: added in place, or deferred
``data_parallel``         what UNSHARD, RESHARD and REDUCE do to a stage in ``DDP`` or ``FSDP``
``chunk_spec``            which tensors are cut into microbatches
``microbatch``            splits a batch into microbatches
``step_specs``            what the ranks know of the values of a step before it begins
``boundary``              values between two stages: any nesting, as a spec and tensors
``packed_message``        small tensors packed into one message
``link``                  sends and receives across one boundary
``ordered_link``          the same where order alone says what a message is, as over NCCL
``stage_links``           the links of the stages of a rank, of the kind that its group has
``send_completion``       which sends are complete when a message arrives
``shared_parameters``     tied weights of several stages, and their gradients
``stage_initialization``  first values of stages on the meta device
``stage_memory``          the bytes that a rank holds for its stages
``stage_state``           state dicts and shards of stages by the names of the model
``returned_values``       losses and outputs, on the last rank or on all
``staged_module``         the part of ``Pipeline`` that does not train
``measure``               when actions ran, and what they cost
``pipeline_view``         what ``ec.show`` says about a ``Pipeline``
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from echelon.pipeline.measure import Measurement, measured_costs
from echelon.pipeline.schedules.check import check
from echelon.pipeline.schedules.choose import Choice, choose
from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.ir import Action, Item, Kind, Pair, Schedule
from echelon.pipeline.schedules.passes import lower
from echelon.pipeline.schedules.render import to_page, to_svg, to_text
from echelon.pipeline.schedules.simulate import Idle, Simulation, Step, Timeline, simulate
from echelon.pipeline.schedules.walk import Channel
from echelon.pipeline.splitting.partition import partition

if TYPE_CHECKING:
    from echelon.pipeline.chunk_spec import Replicate, TensorChunkSpec
    from echelon.pipeline.schedules.judgement import ScheduleVerdict, judge
    from echelon.pipeline.schedules.waits import Wait, WaitCause, WaitRule
    from echelon.pipeline.splitting.split import split

__all__ = [
    "Action",
    "Channel",
    "Choice",
    "Idle",
    "Item",
    "Kind",
    "Measurement",
    "Pair",
    "Replicate",
    "Schedule",
    "ScheduleVerdict",
    "Simulation",
    "Step",
    "TensorChunkSpec",
    "Timeline",
    "Wait",
    "WaitCause",
    "WaitRule",
    "check",
    "choose",
    "judge",
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

# Those that few programs need, or that need torch, and where they live: in no module of the same
# name, which would hide them.
_LATE = {
    "Replicate": "echelon.pipeline.chunk_spec",
    "ScheduleVerdict": "echelon.pipeline.schedules.judgement",
    "TensorChunkSpec": "echelon.pipeline.chunk_spec",
    "Wait": "echelon.pipeline.schedules.waits",
    "WaitCause": "echelon.pipeline.schedules.waits",
    "WaitRule": "echelon.pipeline.schedules.waits",
    "judge": "echelon.pipeline.schedules.judgement",
    "split": "echelon.pipeline.splitting.split",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'echelon.pipeline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = value
    return value
