"""What ``ec.show`` says about a ``Pipeline``: which rank has which stage, and the schedule."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from echelon.modules.sharded_tensor import local_shard
from echelon.page import TextTable, View, ViewPart, bytes_text, view_of
from echelon.pipeline.schedules.dataflow import crossings
from echelon.pipeline.schedules.ir import Schedule

_MOST_ROWS = 64


def pipeline_view(schedule: Schedule, stages: Mapping[str, nn.Module], rank: int) -> View:
    """The view of the stages that ``rank`` has of a pipeline. Nothing is communicated."""
    planned = view_of(schedule)
    rows = []
    for stage, owner in enumerate(schedule.placement[:_MOST_ROWS]):
        module = stages.get(str(stage))
        if module is None:
            rows.append([str(stage), str(owner), "", "", ""])
            continue
        parts = [local_shard(param) for param in module.parameters()]
        numel, nbytes = sum(p.numel() for p in parts), sum(p.nbytes for p in parts)
        name = type(module).__name__
        rows.append([str(stage), str(owner), name, f"{numel:,}", bytes_text(nbytes)])
    heads = ["stage", "rank", "module", f"parameters on rank {rank}", "bytes"]
    stages_part = ViewPart(
        title="Who has which stage",
        about=f"Modules are known of rank {rank}, where this is shown.",
        content=TextTable(heads=heads, rows=rows),
    )
    inside = [
        ViewPart(title=f"Stage {index}: {part.title}", about=part.about, content=part.content)
        for index, module in stages.items()
        if view_of.dispatch(type(module)) is not view_of.dispatch(object)
        for part in view_of(module).parts[:1]
    ]
    sent = ViewPart(
        title="Sent in a step",
        about="Each transfer is the output of a stage for one microbatch, or its gradient.",
        content=_transfers(schedule),
    )
    return View(
        title=f"Pipeline of {planned.title}",
        facts=planned.facts,
        parts=[stages_part, *inside, *planned.parts, sent],
    )


def _transfers(schedule: Schedule) -> TextTable:
    """How many activations and gradients each rank sends in a step."""
    num_ranks, m = schedule.num_ranks, schedule.num_microbatches
    forward, backward = [0] * num_ranks, [0] * num_ranks
    for _, source, target in crossings(schedule.placement):
        forward[source] += m
        backward[target] += m if schedule.has_backward else 0
    rows = [
        [str(rank), str(sent), str(back)]
        for rank, (sent, back) in enumerate(zip(forward, backward, strict=True))
    ]
    return TextTable(heads=["rank", "outputs", "gradients"], rows=rows[:_MOST_ROWS])
