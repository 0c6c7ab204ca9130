"""The view of a pipeline: its stages, what they are wrapped in, the schedule, and transfers."""

from typing import Any

from torch import nn

import echelon as ec
from echelon.page import TextTable, View, view_of


def shown(world: ec.World) -> tuple[View, str]:
    plan = ec.Plan(pp=2, shard=2, microbatches=4, fsdp={"min_num_params": 0})
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe: Any = ec.parallelize(stages, plan, world, loss_fn=nn.MSELoss())
    return view_of(pipe), pipe._repr_html_()


def test_a_rank_shows_its_stage_its_shards_and_the_schedule() -> None:
    for rank, (view, html) in enumerate(ec.run(shown, 4)):
        assert view.title == "Pipeline of 1f1b: 2 ranks, 2 stages, 4 microbatches"
        stages, shards, timeline, *_, sent = view.parts
        assert isinstance(stages.content, TextTable)
        mine = rank // 2
        assert [row[2] for row in stages.content.rows][mine] == "FSDP"
        assert [row[2] for row in stages.content.rows][1 - mine] == ""
        assert shards.title == f"Stage {mine}: Who has which bytes"
        assert timeline.title == "Simulated"
        assert isinstance(sent.content, TextTable)
        assert sent.content.rows == [["0", "4", "0"], ["1", "0", "4"]]
        assert html.count("<svg") == 2
