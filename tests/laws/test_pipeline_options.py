"""No option of a pipeline is inert: each test here fails when the option it names is ignored."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.pipeline.models import Alive, Counted, batch, build, mse
from tests.pipeline.options import Options
from tests.worlds import events_of, run_world

OPTIONS = Options()
option = OPTIONS.option


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


@option("Pipeline.replicate")
def replicate_averages_shared_parameters_over_replicas(world: World) -> None:
    """Two stages on one rank share a weight that ``DDP`` leaves alone; each rank has its rows."""
    torch.manual_seed(0)
    inner = [nn.Linear(3, 3).double() for _ in range(3)]
    inner[2].weight = shared = inner[0].weight
    x, y = torch.randn(2, 8, 3, dtype=torch.float64)
    expected = torch.autograd.grad(mse(nn.Sequential(*inner)(x), y), shared)[0]
    mesh = world.mesh(dp=world.size, pp=1)
    stages = [
        ec.DDP(nn.Sequential(*own), mesh["dp"], ignored=[shared]) for own in (inner[:2], inner[2:])
    ]
    pipe = pipeline(
        world, stages=stages, group=mesh["pp"], schedule="zb", replicate=mesh["dp"], microbatches=2
    )
    rows = slice(4 * world.rank, 4 * world.rank + 4)
    pipe.step(x[rows], target=y[rows])
    torch.testing.assert_close(shared.grad, expected, rtol=1e-12, atol=1e-12)


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
    with events_of(world.rank, "pipeline.action") as actions:
        stepped(pipe)
    return sum(action.facts["kind"].name == kind for action in actions)


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


class Masked(nn.Module):
    """Adds up a table of which every row needs all."""

    def forward(self, x: Tensor, table: Tensor | None = None, *, mask: Any = None) -> Tensor:
        return x * (1.0 if table is None else table.sum()) + (0.0 if mask is None else mask.sum())


@option("Pipeline.args_chunk_spec", "Pipeline.kwargs_chunk_spec", "Pipeline.target_chunk_spec")
def chunk_specs_say_what_every_microbatch_gets_whole(world: World) -> None:
    x, y = batch(8)
    table = torch.arange(8.0, dtype=torch.float64)
    whole = ec.pipeline.Replicate()
    for name, spec, args, target, kwargs in (
        ("args", (None, whole), (x, table), y, {}),
        ("kwargs", {"mask": whole}, (x,), y, {"mask": table}),
        ("target", (None, whole), (x,), (y, table), {}),
    ):
        losses = []
        for options in ({f"{name}_chunk_spec": spec}, {}):
            pipe = pipeline(
                world,
                stages=[Masked(), Masked()],
                loss_fn=lambda out, y: mse(out, y) if isinstance(y, Tensor) else y[1].sum(),
                **options,
            )
            losses.append(pipe.eval_step(*args, target=target, loss_everywhere=True, **kwargs))
        assert losses[0] != losses[1], name
        if name == "target":
            assert losses[0] == table.sum()


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


@option("forward.outputs_everywhere")
def outputs_are_where_they_are_asked_for(world: World) -> None:
    pipe = pipeline(world)
    x, _ = batch(8)
    assert (pipe(x) is None) == (world.rank == 0)
    assert pipe(x, outputs_everywhere=True).shape == (8, 6)


@option("Pipeline.results_everywhere")
def results_are_everywhere_where_no_call_says_otherwise(world: World) -> None:
    pipe = pipeline(world, results_everywhere=True)
    x, y = batch(8)
    losses = pipe.step(x, target=y), pipe.eval_step(x, target=y)
    assert losses[0] == losses[1]
    assert pipe(x).shape == (8, 6)
    assert (pipe(x, outputs_everywhere=False) is None) == (world.rank == 0)
    assert (pipe.step(x, target=y, loss_everywhere=False) is None) == (world.rank == 0)


@option("step.weights", "eval_step.weights")
def weights_are_what_microbatches_count(world: World) -> None:
    first = stepped(pipeline(world), weights=[1.0, 0.0, 0.0, 0.0])
    pipe = pipeline(world, microbatches=1)
    x, y = batch(8)
    loss = pipe.step(x[:2], target=y[:2])
    torch.testing.assert_close(first, gradients(pipe))
    evaluated = pipeline(world).eval_step(x, target=y, weights=[1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(evaluated, loss)
    assert differ(first, stepped(pipeline(world)))


@option("step.finalize")
def finalize_completes_gradients(world: World) -> None:
    """Hooks see a gradient once it is complete. One that both ranks have is whole between steps."""
    for finalize in (True, False):
        seen: list[Tensor] = []
        shared = build("plain", 2)[0]
        model = nn.Sequential(copy.deepcopy(shared))
        for param in shared.parameters():
            param.register_post_accumulate_grad_hook(seen.append)
        pipe = pipeline(world, stages=[shared, nn.Sequential(shared, nn.Tanh())])
        mine = stepped(pipe, finalize=finalize)
        x, y = batch(8)
        mse(torch.tanh(model(model(x))), y).backward()
        assert not differ(mine, [param.grad for param in model.parameters()])
        assert len(seen) == (len(mine) if finalize else 0)


@pytest.mark.slow
def test_every_option_of_a_pipeline_and_of_its_calls_does_something() -> None:
    run_world("threads", OPTIONS.check, 2)


def test_an_option_without_a_test_would_be_seen() -> None:
    for name, of in (
        ("Pipeline", ec.Pipeline),
        ("step", ec.Pipeline.step),
        ("eval_step", ec.Pipeline.eval_step),
        ("forward", ec.Pipeline.forward),
    ):
        assert {*inspect.signature(of).parameters} - {"self"} == OPTIONS.tested[name], name
    assert {*inspect.signature(ec.Pipeline.measure).parameters} == {"self"}
