"""No option of a plan or of a split is inert: each test here fails when it is ignored."""

import copy
import inspect
import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from tests.pipeline.models import batch, build, mse
from tests.pipeline.options import Options
from tests.worlds import events_of, run_world

OPTIONS = Options()
option = OPTIONS.option


# --- split ---------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """What is registered first runs first, if nobody says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.end = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.end(x)
        return out


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


def cut(model: nn.Module, num_stages: int = 2, **options: Any) -> list[int]:
    """How many layers of a Sequential are in each stage."""
    stages = ec.pipeline.split(model, num_stages, **options)
    return [len({key.partition(".")[0] for key in stage.state_dict()}) for stage in stages]


def row(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers) if layers else nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))


@option("split.module", "split.num_stages", "split.cost", "split.example", "split.group")
def split_cuts_by_cost(world: World) -> None:
    assert cut(row()) == [3, 3]
    assert cut(row(), 3) == [2, 2, 2]
    assert cut(row(nn.Linear(6, 90), nn.Linear(90, 6), nn.Linear(6, 6))) == [1, 2]
    assert cut(row(), cost=[9, 1, 1, 1, 1, 1]) == [1, 5]
    table = row(nn.Embedding(100, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    tokens = torch.zeros(2, dtype=torch.long)
    assert (cut(table), cut(table, cost="flops", example=tokens)) == ([1, 2], [2, 1])
    model = row(*(nn.Linear(6, 6) for _ in range(3)), Slow(6, 6))
    timed = cut(model, cost="time", example=torch.ones(1, 6), group=world.group)
    assert timed == [3, 1] != cut(model)


@option("split.schedule", "split.memory_cap")
def split_minds_what_the_schedule_keeps_alive(world: World) -> None:
    """The first stage of 1F1B has two microbatches alive, so a cap gives it fewer layers."""
    example = torch.ones(100, 6)  # a layer keeps 2400 bytes of it, and 4 * 168 of its own
    caps = {}
    for name in ("1f1b", "gpipe"):
        options = {"schedule": ec.pipeline.schedule(name, 2, 4, 2), "example": example}
        with pytest.raises(ArgumentError, match="least cap that works is") as info:
            cut(row(), memory_cap=1, **options)
        least = int(re.findall(r"cap that works is (\d+)", str(info.value))[0])
        caps[name] = least, cut(row(), memory_cap=least, **options)
    assert caps["1f1b"][0] < caps["gpipe"][0]
    assert caps["1f1b"][1] == [2, 4]
    assert caps["gpipe"][1] == [3, 3]


@option("split.prefix", "split.suffix")
def prefix_and_suffix_say_what_runs_where(world: World) -> None:
    for options, first, last in (
        ({}, "start", "end"),
        ({"prefix": ["start", "end"], "suffix": ["end"]}, "end", "end"),
        ({"prefix": ["start"], "suffix": ["start", "end"]}, "start", "start"),
    ):
        stages = ec.pipeline.split(Blocks(), 2, **options)
        assert f"{first}.weight" in stages[0].state_dict()
        assert f"{last}.weight" in stages[1].state_dict()
    assert "end.weight" not in ec.pipeline.split(Blocks(), 2)[0].state_dict()


# --- Plan and parallelize ------------------------------------------------------------------------


def planned(world: World, model: Any = None, loss_fn: Any = None, **options: Any) -> nn.Module:
    rest = {"units": options.pop("units", None), "loss_fn": loss_fn}
    plan = ec.Plan(**({"pp": 2, "microbatches": 4} if "pp" not in options else {}) | options)
    return ec.parallelize(model or row().double(), plan, world, **rest)


@option("Plan.pp", "Plan.dp", "Plan.shard", "Plan.strategy", "parallelize.units")
def axes_choose_the_technique(world: World) -> None:
    assert type(planned(world)) is ec.Pipeline
    assert type(planned(world, pp=1, dp=2)) is ec.DDP
    model = planned(world, pp=1, shard=2)
    assert type(model) is ec.FSDP
    gathers = []
    for strategy in (None, ec.Strategy.SHARD_GRAD_OP):
        many = planned(world, pp=1, shard=2, units=ec.units.by_type(nn.Linear), strategy=strategy)
        many(torch.ones(1, 6).double()).sum().backward()
        gathers.append(many.memory_stats().num_all_gathers)
    assert len(many.units) > len(model.units)
    assert gathers[0] > gathers[1]  # again in backward, or kept since forward


@option("Plan.microbatches", "Plan.schedule", "Plan.chunks")
def a_plan_has_its_schedule(world: World) -> None:
    for options, name, microbatches, stages in (
        ({}, "1f1b", 4, 2),
        ({"schedule": "gpipe"}, "gpipe", 4, 2),
        ({"pp": 2, "microbatches": 6}, "1f1b", 6, 2),
        ({"chunks": 2, "schedule": "interleaved"}, "interleaved", 4, 4),
    ):
        found = planned(world, **options).schedule
        assert (found.name, found.num_microbatches, found.num_stages) == (
            name,
            microbatches,
            stages,
        )


@option("parallelize.model", "parallelize.plan", "parallelize.loss_fn")
def parallelize_trains_its_model(world: World) -> None:
    stages = build("plain", 2)
    for model in (stages, nn.Sequential(*copy.deepcopy(stages))):
        for loss_fn in (mse, lambda y, target: 2 * mse(y, target)):
            pipe = planned(world, copy.deepcopy(model), loss_fn)
            x, y = batch(8)
            found = pipe.step(x, target=y, loss_everywhere=True)
            torch.testing.assert_close(found, loss_fn(nn.Sequential(*stages)(x), y).detach())


@option("parallelize.world")
def the_world_is_shared(world: World) -> None:
    assert list(planned(world).stages) == [str(world.rank)]


@option("Plan.fsdp", "Plan.ddp")
def options_of_wrappers_reach_them(world: World) -> None:
    """A model too small to be sharded; a bucket for each parameter, or one for all."""
    kept = planned(world, pp=1, shard=2, fsdp={"min_num_params": 10**9})
    assert [p.shape for p in kept.parameters()] == [p.shape for p in row().parameters()]
    numbers = []
    for cap in (25 * 2**20, 0):
        model = planned(world, pp=1, dp=2, ddp={"bucket_bytes": cap, "first_bucket_bytes": cap})
        with events_of(world.rank, "collective.issue") as calls:
            model(torch.ones(1, 6).double()).sum().backward()
        numbers.append(len(calls))
    assert numbers[0] < numbers[1]


@option("Plan.pipeline", ranks=4)
def options_of_stages_that_are_shared(world: World) -> None:
    plan = {"pp": 2, "shard": 2, "microbatches": 4, "chunks": 2, "schedule": "interleaved"}
    blocks = [nn.Linear(40, 40).double() for _ in range(4)]
    counts = []
    for options in ({}, {"reduce_every": "microbatch"}, {"window_nbytes": 0}):
        pipe = planned(world, copy.deepcopy(blocks), mse, **plan, pipeline=options)
        x = torch.ones(8, 40, dtype=torch.float64)
        with events_of(world.rank, "pipeline.action") as actions:
            pipe.step(x, target=x)
        kinds = [action.facts["kind"].name for action in actions]
        counts.append((kinds.count("REDUCE"), kinds.count("UNSHARD")))
    (once, gathers), (never, _), (_, again) = counts
    assert (once, never) == (2, 0)
    assert again > gathers


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_option_of_a_plan_and_of_a_split_does_something(ranks: int) -> None:
    run_world("threads", OPTIONS.check, ranks)


def test_an_option_without_a_test_would_be_seen() -> None:
    for name, of in (
        ("split", ec.pipeline.split),
        ("Plan", ec.Plan),
        ("parallelize", ec.parallelize),
    ):
        assert {*inspect.signature(of).parameters} == OPTIONS.tested[name], name
