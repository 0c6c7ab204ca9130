"""No option of a pipeline is inert: each test here fails when the option it names is ignored."""

import copy
import inspect
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import ArgumentError
from echelon.world.base import World
from tests.pipeline.models import Alive, Counted, batch, build, mse
from tests.worlds import run_world

TESTED: dict[str, set[str]] = {}  # by callable, the options that have a test here

Check = Callable[[World], None]
CHECKS: dict[str, Check] = {}


def option(*names: str) -> Callable[[Check], Check]:
    """A rank function that fails when these options are ignored: ``"callable.option"``."""

    def put(fn: Check) -> Check:
        for name in names:
            of, _, parameter = name.rpartition(".")
            TESTED.setdefault(of, set()).add(parameter)
        CHECKS[fn.__name__] = fn
        return fn

    return put


def pipeline(world: World, **options: Any) -> ec.Pipeline:
    options = {"microbatches": 4, "loss_fn": mse, **options}
    stages = options.pop("stages", None) or build("plain", world.size)
    return ec.Pipeline(stages, options.pop("group", world.group), **options)


def gradients(pipe: ec.Pipeline) -> list[Tensor]:
    """Of a pipeline that has stepped."""
    found = [param.grad for param in pipe.parameters()]
    assert all(grad is not None for grad in found)
    return found  # type: ignore[return-value]


def stepped(pipe: ec.Pipeline, rows: int = 8, **options: Any) -> list[Tensor]:
    """Its gradients after a step."""
    x, y = batch(rows)
    pipe.step(x, target=y, **options)
    return gradients(pipe)


def differ(some: list[Tensor], others: list[Tensor]) -> bool:
    return any(not torch.allclose(a, b) for a, b in zip(some, others, strict=True))


# --- Pipeline ------------------------------------------------------------------------------------


@option("Pipeline.stages")
def stages_are_what_is_trained(world: World) -> None:
    other = build("plain", 3)[1:]
    assert differ(stepped(pipeline(world)), stepped(pipeline(world, stages=other)))


@option("Pipeline.group")
def group_says_which_ranks_have_stages(world: World) -> None:
    turned = world.group.subgroup([0, 1])
    alone = world.mesh(replica=2, pp=1)["pp"]
    assert turned is not None
    assert list(pipeline(world, group=turned).stages) == [str(world.rank)]
    assert list(pipeline(world, group=alone, stages=build("plain", 1)).stages) == ["0"]


@option("Pipeline.microbatches")
def microbatches_cut_the_batch(world: World) -> None:
    for microbatches in (2, 4):
        graphs = Alive()
        stages = [Counted(stage, graphs) for stage in build("plain", 2)]
        pipe = pipeline(world, stages=stages, microbatches=microbatches, schedule="gpipe")
        stepped(pipe)
        assert graphs.most == microbatches


@option("Pipeline.schedule", "Pipeline.schedule_options")
def schedule_is_what_runs(world: World) -> None:
    stepped(one := pipeline(world, schedule="gpipe"))
    stepped(other := pipeline(world, schedule="1f1b"))
    assert (one.most_alive, other.most_alive) == (4, 2 - world.rank)
    orders = [
        pipeline(
            world, schedule="interleaved", stages=build("plain", 4), factor=factor
        ).schedule.orders
        for factor in (1, 2)
    ]
    assert orders[0] != orders[1]


@option("Pipeline.loss_fn")
def loss_fn_makes_the_gradient(world: World) -> None:
    twice = pipeline(world, loss_fn=lambda y, target: 2 * mse(y, target))
    for one, other in zip(stepped(pipeline(world)), stepped(twice), strict=True):
        torch.testing.assert_close(2 * one, other)


@option("Pipeline.loss_reduction")
def loss_reduction_weighs_microbatches(world: World) -> None:
    added = pipeline(world, loss_reduction="sum")
    for one, other in zip(stepped(pipeline(world)), stepped(added), strict=True):
        torch.testing.assert_close(4 * one, other)  # four means of two rows


@option("Pipeline.recompute")
def recompute_runs_forward_again(world: World) -> None:
    for recompute, forwards in ((False, 4), (True, 8)):
        stages = build("plain", 2)
        calls: list[int] = []
        stages[world.rank].up.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        stepped(pipeline(world, stages=stages, recompute=recompute))
        assert len(calls) == forwards


@option("Pipeline.materialize")
def materialize_gives_first_values(world: World) -> None:
    means = []
    for materialize in (None, lambda module: nn.init.constant_(module.weight, 3.0)):
        with torch.device("meta"):
            stages = [nn.Linear(6, 6, bias=False) for _ in range(2)]
        pipe = pipeline(world, stages=stages, materialize=materialize)
        means.append(next(pipe.parameters()).mean().item())
    assert means[0] != 3.0 == means[1]


def sharded(world: World, chunks: int = 1, **options: Any) -> ec.Pipeline:
    """Stages in FSDP, over a group of one rank."""
    own = world.mesh(pp=2, shard=1)["shard"]
    size = 2 * chunks
    stages: list[nn.Module] = [nn.Linear(6, 6).double() for _ in range(size)]
    for index in range(world.rank, size, 2):
        stages[index] = ec.FSDP(stages[index], own, min_num_params=0)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return pipeline(world, stages=stages, schedule=schedule, **options)


def ran(world: World, pipe: ec.Pipeline, kind: str) -> int:
    """How many actions of a kind this rank does in a step."""
    found: list[ec.events.Event] = []
    with ec.events.listen(found.append):
        stepped(pipe)
    mine = [e.facts for e in list(found) if e.name == "pipeline.action"]
    return sum(f["rank"] == world.rank and f["kind"].name == kind for f in mine)


@option("Pipeline.reduce_every")
def reduce_every_says_when_gradients_are_reduced(world: World) -> None:
    assert ran(world, sharded(world), "REDUCE") == 1
    assert ran(world, sharded(world, reduce_every="microbatch"), "REDUCE") == 0


@option("Pipeline.window_nbytes")
def window_nbytes_bounds_what_is_whole(world: World) -> None:
    gathers = [
        ran(world, sharded(world, chunks=2, window_nbytes=window), "UNSHARD")
        for window in (None, 0)
    ]
    assert gathers[0] < gathers[1]


# --- step, eval_step, forward, measure -----------------------------------------------------------


class Scaled(nn.Linear):
    """Takes a second argument and a keyword."""

    def forward(self, x: Tensor, other: Any = 0.0, *, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale + other


@option(
    *(f"{of}.{name}" for of in ("step", "eval_step", "forward") for name in ("args", "kwargs")),
    *(f"{of}.{name}" for of in ("step", "eval_step") for name in ("target", "loss_everywhere")),
)
def what_a_call_is_given_is_used(world: World) -> None:
    torch.manual_seed(0)
    stages = [Scaled(6, 6).double() for _ in range(2)]
    pipe = pipeline(world, stages=stages)
    x, y = batch(8)
    for args, target, kwargs in (
        ((x,), y, {}),
        ((2 * x,), y, {}),
        ((x, y), y, {}),
        ((x,), -y, {}),
        ((x,), y, {"scale": 3.0}),
    ):
        value = stages[1](stages[0](*args, **kwargs), **kwargs).detach()
        found = pipe(*args, **kwargs)
        expected = mse(value, target)
        for call in (pipe.step, pipe.eval_step):
            losses = [
                call(*args, target=target, loss_everywhere=everywhere, **kwargs)
                for everywhere in (True, False)
            ]
            torch.testing.assert_close(losses[0], expected)
            assert (losses[1] is None) == (world.rank == 0)
        if world.rank:
            torch.testing.assert_close(found, value)


@option("step.weights")
def weights_are_what_microbatches_count(world: World) -> None:
    first = stepped(pipeline(world), weights=[1.0, 0.0, 0.0, 0.0])
    pipe = pipeline(world, microbatches=1)
    x, y = batch(8)
    pipe.step(x[:2], target=y[:2])
    torch.testing.assert_close(first, gradients(pipe))
    assert differ(first, stepped(pipeline(world)))


@option("step.finalize")
def finalize_reduces_gradients(world: World) -> None:
    """A parameter that both ranks have: its gradient is whole only then."""
    for finalize in (True, False):
        shared = build("plain", 2)[0]
        model = nn.Sequential(copy.deepcopy(shared))
        pipe = pipeline(world, stages=[shared, nn.Sequential(shared, nn.Tanh())])
        mine = stepped(pipe, finalize=finalize)
        x, y = batch(8)
        mse(torch.tanh(model(model(x))), y).backward()
        assert differ(mine, [param.grad for param in model.parameters()]) != finalize


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
        time.sleep(0.002)
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


@option("Plan.reduce_every", "Plan.window_nbytes")
def options_of_stages_that_are_shared(world: World) -> None:
    """On four ranks."""
    plan = {"pp": 2, "shard": 2, "microbatches": 4, "chunks": 2, "schedule": "interleaved"}
    blocks = [nn.Linear(40, 40).double() for _ in range(4)]
    counts = []
    for options in ({}, {"reduce_every": "microbatch"}, {"window_nbytes": 0}):
        pipe = planned(world, copy.deepcopy(blocks), mse, **plan, **options)
        x = torch.ones(8, 40, dtype=torch.float64)
        found: list[ec.events.Event] = []
        with ec.events.listen(found.append):
            pipe.step(x, target=x)
        facts = [e.facts for e in list(found) if e.name == "pipeline.action"]
        mine = [f["kind"].name for f in facts if f["rank"] == world.rank]
        counts.append((mine.count("REDUCE"), mine.count("UNSHARD")))
    (once, gathers), (never, _), (_, again) = counts
    assert (once, never) == (2, 0)
    assert again > gathers


ON_FOUR = {"options_of_stages_that_are_shared"}


def run_checks(world: World) -> None:
    for name, fn in CHECKS.items():
        if (name in ON_FOUR) != (world.size == 4):
            continue
        try:
            fn(world)
        except Exception as error:
            error.add_note(f"in check {name}")
            raise


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_option_of_a_pipeline_and_of_its_calls_does_something(ranks: int) -> None:
    run_world("threads", run_checks, ranks)


def test_an_option_without_a_test_would_be_seen() -> None:
    for name, of in (
        ("Pipeline", ec.Pipeline),
        ("step", ec.Pipeline.step),
        ("eval_step", ec.Pipeline.eval_step),
        ("forward", ec.Pipeline.forward),
        ("split", ec.pipeline.split),
        ("Plan", ec.Plan),
        ("parallelize", ec.parallelize),
    ):
        assert {*inspect.signature(of).parameters} - {"self"} == TESTED[name], name
    assert {*inspect.signature(ec.Pipeline.measure).parameters} == {"self"}
