"""Stages that are replicated or sharded train as one process does on all batches together."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, UnsupportedError
from tests.pipeline.models import batch, build, each, mse, rows_of, train_beside
from tests.pipeline.test_api import Embedding, Head
from tests.pipeline.tied_stages import CLOSE
from tests.worlds import run_world

ROWS = 6
KEPT = ec.Strategy.SHARD_GRAD_OP


def plan(schedule: str, **options: Any) -> ec.Plan:
    """On two ranks for the stages; ``options`` are axes, a strategy, or of the pipeline."""
    chunks = 1 if schedule in ("1f1b", "zb-h1") else 2
    own = {name: options.pop(name) for name in ("reduce_every", "window_nbytes") if name in options}
    options |= {"microbatches": 3, "schedule": schedule, "chunks": chunks, "pipeline": own}
    return ec.Plan(pp=2, **options)


def trains(world: World, plan: ec.Plan, steps: int = 2) -> None:
    """Trained beside the plain model; then evaluated and saved."""
    stages = build("plain", plan.pp * plan.chunks)
    model = nn.Sequential(*copy.deepcopy(stages))
    units = ec.units.by_type(nn.Linear) if plan.shard > 1 else None
    pipe = ec.parallelize(stages, plan, world, loss_fn=mse, units=units)
    batches = [batch(ROWS * plan.data_size, step) for step in range(2 * steps)]
    train_beside(world, plan, pipe, model, batches, mse)
    x, y = batches[-1]
    loss = pipe.eval_step(x, target=y, loss_everywhere=True)
    torch.testing.assert_close(loss, mse(model(x), y).detach(), **CLOSE)
    whole = model.state_dict()
    assert list(pipe.state_dict()) == [k for k in whole if k.partition(".")[0] in pipe.stages]
    pipe.load_state_dict({key: value + 1 for key, value in whole.items()})
    for key, value in pipe.state_dict().items():
        torch.testing.assert_close(value, whole[key] + 1, **CLOSE, msg=key)


PLANS: dict[str, list[ec.Plan]] = {
    "threads": [
        plan("zb-v", dp=2),
        plan("zb-h1", dp=2, reduce_every="microbatch"),
        plan("1f1b", shard=2, reduce_every="microbatch"),
    ],
    "processes": [plan("interleaved", dp=2), plan("zb-h1", shard=2, strategy=KEPT)],
    "gloo": [  # where a gather moves bytes
        plan("1f1b", dp=2),
        plan("1f1b", shard=2),
        plan("interleaved", shard=2, strategy=KEPT, window_nbytes=0),
        plan("zb-v", shard=2, window_nbytes=1000),
        plan("zb-h1", shard=2, reduce_every="microbatch"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", PLANS)
def test_shared_stages_train_as_one_process_does(world: str) -> None:
    checks: list[Any] = [partial(trains, plan=one) for one in PLANS[world]]
    if world == "gloo":  # where a gather moves bytes
        checks += [reduces_where_the_schedule_says, keeps_the_window]
    run_world(world, each, 4, (checks,))


@pytest.mark.slow
def test_a_mesh_of_three_axes_trains_as_one_process_does() -> None:
    run_world("threads", trains, 8, (plan("1f1b", dp=2, shard=2), 1))


# --- what else a stage may be --------------------------------------------------------------------


def compare(pipe: nn.Module, model: nn.Sequential) -> None:
    """Whole gradients of DDP, or norms of sharded ones, against the plain model."""
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(ec.clip_grad_norm_(pipe, 1e9), expected, **CLOSE)
    for index, stage in pipe.stages.items():
        if isinstance(stage, ec.DDP):
            plain = dict(model.get_submodule(index).named_parameters())
            for name, param in stage.named_parameters():
                torch.testing.assert_close(param.grad, plain[name].grad, **CLOSE, msg=name)


def recomputes(world: World) -> None:
    """The whole wrapped stage runs again in backward."""
    mesh = world.mesh(pp=2, dp=2)
    for wrap in (
        lambda stage: ec.DDP(stage, mesh["dp"]),
        lambda stage: ec.FSDP(
            stage, mesh["dp"], units=ec.units.by_type(nn.Linear), min_num_params=0
        ),
        lambda stage: ec.FSDP(stage, mesh["dp"], min_num_params=0, use_orig_params=False),
    ):
        stages = build("plain", 2)
        model = nn.Sequential(*copy.deepcopy(stages))
        stage = mesh.coordinates["pp"]
        stages[stage] = wrap(stages[stage])
        pipe = ec.Pipeline(
            stages, mesh["pp"], microbatches=3, schedule="zb-h1", loss_fn=mse, recompute=True
        )
        mine = rows_of(world, ec.Plan(pp=2, dp=2, microbatches=3), 2 * ROWS)
        for step in range(2):  # the second on top of what the first has reduced
            x, y = batch(2 * ROWS, step)
            mse(model(x), y).backward()
            pipe.step(x[mine], target=y[mine])
            compare(pipe, model)


def ties_by_hand(world: World) -> None:
    """Replicas reduce a shared parameter, each stage by its own wrapper."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(7, 6).double())
    model = nn.Sequential(Embedding(weight), nn.Identity(), Head(weight))
    stages = copy.deepcopy([nn.Sequential(*model[:2]), model[2]])
    stages[1].weight = stages[0][0].weight
    mesh = world.mesh(pp=2, dp=2)
    stages[mesh.coordinates["pp"]] = ec.DDP(stages[mesh.coordinates["pp"]], mesh["dp"])
    cross = nn.CrossEntropyLoss()
    pipe = ec.Pipeline(stages, mesh["pp"], microbatches=3, loss_fn=cross)
    mine = rows_of(world, ec.Plan(pp=2, dp=2, microbatches=3), 2 * ROWS)
    for step in range(3):  # then on top of its gradients
        generator = torch.Generator().manual_seed(step)
        tokens, target = torch.randint(7, (2, 2 * ROWS), generator=generator)
        cross(model(tokens), target).backward()
        pipe.step(tokens[mine], target=target[mine])
        grads = [param.grad for param in pipe.parameters()]
        torch.testing.assert_close(grads, [weight.grad] * len(grads), **CLOSE)
        norm = torch.linalg.vector_norm(weight.grad)
        torch.testing.assert_close(ec.clip_grad_norm_(pipe, 1e9), norm, **CLOSE)


def frozen_and_empty(world: World) -> None:
    """A stage that does not train, and one without parameters."""
    for options in ({"dp": 2}, {"shard": 2}):
        stages: list[nn.Module] = [*build("plain", 3)[:3], nn.Tanh()]
        stages[1].requires_grad_(False)
        model = nn.Sequential(*copy.deepcopy(stages))
        one = plan("interleaved", **options)
        pipe = ec.parallelize(stages, one, world, loss_fn=mse)
        mine = rows_of(world, one, 2 * ROWS)
        for step in range(2):
            x, y = batch(2 * ROWS, step)
            mse(model(x), y).backward()
            pipe.step(x[mine], target=y[mine])
            compare(pipe, model)


def reduces_where_the_schedule_says(world: World) -> None:
    """Once a step and not before, or with each microbatch, where less memory is used."""
    peaks = {}
    for every, count in (("step", 1), ("microbatch", 3)):
        block = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6))).double()
        stages = [block, copy.deepcopy(block)]
        one = ec.Plan(pp=2, shard=2, microbatches=3, pipeline={"reduce_every": every})
        units = ec.units.by_type(nn.Linear)
        pipe = ec.parallelize(stages, one, world, loss_fn=mse, units=units)
        (stage,) = pipe.stages.values()
        x = torch.ones(3, 40, dtype=torch.float64)
        pipe.step(x, target=x, finalize=False)
        early = stage.memory_stats().num_reduce_scatters
        assert early == (0 if every == "step" else 18)
        pipe.step(x, target=x)
        stats = stage.memory_stats()
        assert stats.num_reduce_scatters - early == 6 * count
        assert not any(unit.gathered for unit in stage.units)
        peaks[every] = stats.peak_gradients
    assert peaks["microbatch"] < 0.5 * peaks["step"]


def keeps_the_window(world: World) -> None:
    """Two stages of one rank are never whole at once, if the window is for one."""
    peaks = []
    for window in (None, 0):
        stages = [nn.Linear(40, 40).double() for _ in range(4)]
        nbytes = 40 * 41 * 8
        one = plan("interleaved", shard=2, window_nbytes=window)
        pipe = ec.parallelize(stages, one, world, loss_fn=mse)
        x = torch.ones(3, 40, dtype=torch.float64)
        own = list(pipe.stages.values())
        seen: list[int] = []

        def look(*_: Any, own: list[Any] = own, seen: list[int] = seen) -> None:
            seen.append(sum(stage.memory_stats().gathered for stage in own))

        for stage in own:
            stage.register_forward_pre_hook(look)
        pipe.step(x, target=x)
        peaks.append(max(seen))
        assert all(stage.memory_stats().gathered == 0 for stage in own)
    assert peaks == [2 * nbytes, nbytes]


@pytest.mark.slow
def test_shared_stages_are_the_plain_model() -> None:
    run_world("threads", each, 4, ((recomputes, ties_by_hand, frozen_and_empty),))


# --- parallelize ---------------------------------------------------------------------------------


def without_stages(world: World) -> None:
    """One technique alone, and both together."""
    for one, kind in (
        (ec.Plan(dp=4), ec.DDP),
        (ec.Plan(shard=4), ec.FSDP),
        (ec.Plan(dp=2, shard=2, strategy=KEPT), ec.FSDP),
    ):
        plain = nn.Sequential(*build("plain", 2))
        model = ec.parallelize(copy.deepcopy(plain), one, world)
        assert isinstance(model, kind)
        x, y = batch(4 * ROWS)
        mine = rows_of(world, one, 4 * ROWS)
        mse(model(x[mine]), y[mine]).backward()
        mse(plain(x), y).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        torch.testing.assert_close(ec.clip_grad_norm_(model, 1e9), expected, **CLOSE)


def cuts_a_model(world: World) -> None:
    """States keep the names of the model that was cut."""
    blocks = nn.Sequential(*build("plain", 4))
    before = copy.deepcopy(blocks)
    for options in ({"dp": 2}, {"shard": 2}):
        one = ec.Plan(pp=2, microbatches=3, **options)
        pipe = ec.parallelize(copy.deepcopy(blocks), one, world)
        x, _ = batch(4)
        output = pipe(x)
        if pipe.has_loss:
            torch.testing.assert_close(output, before(x).detach(), **CLOSE)
        first = 0 if pipe.has_input else 2
        keys = [key for key in before.state_dict() if int(key[0]) in (first, first + 1)]
        assert list(pipe.state_dict()) == keys
        doubled = {key: 2 * value for key, value in before.state_dict().items()}
        pipe.load_state_dict(doubled)
        for key, value in pipe.state_dict().items():
            assert torch.equal(value, doubled[key])


def refuses(world: World) -> None:
    stages = build("plain", 2)
    shared = nn.Linear(2, 2)
    four = ec.Plan(pp=2, dp=2, microbatches=2)
    tied = [shared, nn.Sequential(shared, nn.Tanh())]
    low = {"precision": ec.MixedPrecision(compute=torch.bfloat16)}
    sharded = ec.Plan(pp=2, shard=2, microbatches=2, fsdp=low)
    summed = ec.Plan(pp=2, dp=2, microbatches=2, ddp={"reduction": "sum"})
    for model, one, options, error, words in (
        (stages, ec.Plan(pp=2, microbatches=2), {}, ArgumentError, r"2 \* 1 \* 1 = 2 ranks.*are 4"),
        (stages, four, {"units": ec.units.whole()}, ArgumentError, "shard is 1"),
        (stages, ec.Plan(dp=4), {}, ArgumentError, "give a torch.nn.Module"),
        (nn.Linear(2, 2), four, {}, ArgumentError, "Linear"),
        (stages[:1], four, {}, ArgumentError, "list of 1; the plan needs"),
        (stages, "dp=4", {}, ArgumentError, "plan is 'dp=4'"),
        (tied, sharded, {}, UnsupportedError, r"'weight'\) and stage 1 \('0.weight'\).*autocast"),
        (tied, summed, {}, UnsupportedError, "scale the loss"),
    ):
        with pytest.raises(error, match=words):
            ec.parallelize(model, one, world, **options)
    group = world.mesh(pp=2, dp=2)["pp"]
    for option in ({"reduce_every": "microbatch"}, {"window_nbytes": 1}, {"reduce_every": "day"}):
        with pytest.raises(ArgumentError, match=next(iter(option))):
            ec.Pipeline(build("plain", 2), group, microbatches=2, **option)
    mesh = world.mesh(pp=2, shard=2)
    stage = mesh.coordinates["pp"]
    with pytest.raises(ArgumentError, match="replicate is 2"):
        ec.Pipeline(build("plain", 2), mesh["pp"], microbatches=2, replicate=2)
    several = [nn.Sequential(nn.Linear(2, 2), shared), nn.Sequential(shared, nn.Linear(2, 2))]
    for ignored, error, words in (
        ([], UnsupportedError, r"rank 0 .*stage 0 \('1.weight'\).* sharded.*replicate="),
        ([*shared.parameters()], ArgumentError, "nobody reduces its gradient over replicas"),
    ):
        wrapped = copy.deepcopy(several)
        names = ("1.weight", "1.bias") if stage == 0 else ("0.weight", "0.bias")
        leave = [wrapped[stage].get_parameter(name) for name in names] if ignored else []
        wrapped[stage] = ec.FSDP(wrapped[stage], mesh["shard"], ignored=leave)
        with pytest.raises(error, match=words):
            ec.Pipeline(wrapped, mesh["pp"], microbatches=2)


@pytest.mark.slow
def test_a_plan_is_carried_out_or_refused() -> None:
    run_world("threads", each, 4, ((without_stages, cuts_a_model, refuses),))


class Warm(nn.Linear):
    """Raises in its second forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("too warm")
        return super().forward(x)


def fails(world: World) -> None:
    stages = [nn.Linear(2, 2), Warm(2, 2) if world.rank == 3 else nn.Linear(2, 2)]
    one = ec.Plan(pp=2, shard=2, microbatches=4)
    pipe = ec.parallelize(stages, one, world, loss_fn=mse)
    pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))


def test_an_exception_in_a_sharded_stage_ends_every_rank_with_its_place() -> None:
    with pytest.raises(ec.StageError, match=r"stage 1 raised ValueError for microbatch 1.*warm"):
        run_world("threads", fails, 4)
