"""How a guest's model is shared: by name, by plan, and in the blocks that it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.integrations.sharing import Sharing


class Block(nn.Linear):
    """A block that a model names."""


class Model(nn.Sequential):
    """Names its blocks as a model of transformers does."""

    _no_split_modules = ("Block",)


def shared(world: ec.World, **choice: Any) -> tuple[str, int]:
    torch.manual_seed(0)
    model = Sharing(**choice).share(Model(Block(4, 4), Block(4, 4), nn.Linear(4, 1)), world)
    units = len(model.units) if isinstance(model, ec.FSDP) else 0
    return type(model).__name__, units


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"plan": "ddp", "options": {"sync": "manual"}}, ("DDP", 0)),
        ({"plan": "fsdp"}, ("FSDP", 3)),
        ({"plan": "fsdp", "units": ec.units.whole()}, ("FSDP", 1)),
        ({"plan": ec.Plan(shard=2)}, ("FSDP", 3)),
        ({"plan": ec.Plan(dp=2)}, ("DDP", 0)),
    ],
)
def test_a_plan_or_its_name_says_how(choice: dict[str, Any], expected: tuple[str, int]) -> None:
    assert ec.run(lambda world: shared(world, **choice), 2) == [expected, expected]


def test_a_plan_with_stages_makes_a_pipeline() -> None:
    def kind(world: ec.World) -> tuple[str, int]:
        sharing = Sharing(plan=ec.Plan(pp=2, microbatches=2))
        loss: Any = nn.MSELoss()
        model = sharing.share(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), world, loss)
        return type(model).__name__, sharing.num_stages

    assert ec.run(kind, 2) == [("Pipeline", 2)] * 2


@pytest.mark.parametrize(
    ("plan", "choice", "sentence"),
    [
        ("zero", {}, "give 'ddp', 'fsdp' or an ec.Plan"),
        (ec.Plan(), {"options": {"init": "trust"}}, "init: options are for plan="),
        ("ddp", {"units": ec.units.whole()}, "shards nothing"),
        ("fsdp", {"units": "Linear"}, "units is 'Linear'; give a rule of ec.units"),
        ("ddp", {"options": {"bucket_byte": 1}}, "'bucket_byte', which is no option of ec.DDP"),
        ("ddp", {"options": {"bucket_bytes": -1}}, "bucket_bytes"),
        ("ddp", {"options": {"precision": ec.MixedPrecision()}}, "no option of ec.DDP"),
        ("fsdp", {"options": {"layout": "columns"}}, "layout"),
        ("fsdp", {"options": {"strategy": ec.Strategy.HYBRID_SHARD}}, "strategy is"),
    ],
)
def test_what_does_not_fit_is_refused_before_there_is_a_model(
    plan: str | ec.Plan, choice: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ec.ArgumentError, match=sentence):
        Sharing(plan=plan, **choice)
