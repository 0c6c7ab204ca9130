"""The view of a DDP has its buckets and what is sent."""

from typing import Any

import torch
from torch import nn

import echelon as ec
from echelon.page import Picture, TextTable, view_of


def shown(world: ec.World) -> Any:
    model = ec.DDP(nn.Linear(4, 2), world.group)
    return view_of(model), model._repr_html_(), model.buckets


def test_every_rank_has_all_and_a_step_sends_the_buckets() -> None:
    for view, html, buckets in ec.run(shown, 2):
        assert view.title == "DDP of Linear: a copy on each of 2 ranks"
        assert view.facts[0] == ("10", "parameters")
        picture, sent, memory = (part.content for part in view.parts)
        assert isinstance(picture, Picture)
        assert "weight (2, 4): all ranks, 32 B" in picture.svg
        assert isinstance(sent, TextTable)
        assert sent.rows == [["0", "2", "float32", f"{buckets[0].nbytes} B", "bias … weight"]]
        assert isinstance(memory, TextTable)
        assert memory.rows[0] == ["parameters", "40 B"]
        assert view.title in html


def test_a_model_can_be_shown_after_its_world_has_ended() -> None:
    model = ec.run(lambda world: ec.DDP(nn.Linear(2, 2), world.group), 2)[1]
    assert "DDP of Linear" in model._repr_html_()
    assert isinstance(model.module.weight, torch.Tensor)
