"""What a user of a pipeline can do besides the plain step, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, ModelMismatch, StageError
from tests.pipeline.models import batch, build, mse
from tests.worlds import KINDS, run_world


def pipeline(world: World, stages: list[nn.Module], **options: Any) -> ec.Pipeline:
    options = {"microbatches": 4, "loss_fn": mse, **options}
    return ec.Pipeline(stages, world.group, **options)


def whole(stages: list[nn.Module]) -> nn.Module:
    return nn.Sequential(*copy.deepcopy(stages))


def same_grads(pipe: ec.Pipeline, model: nn.Module) -> None:
    for index, stage in pipe.stages.items():
        plain = model.get_submodule(index)
        for (name, param), expected in zip(
            stage.named_parameters(), plain.parameters(), strict=True
        ):
            if expected.grad is None:
                assert param.grad is None, (index, name)
                continue
            torch.testing.assert_close(
                param.grad, expected.grad, rtol=1e-11, atol=1e-12, msg=f"{index}.{name}"
            )


# --- numbers -------------------------------------------------------------------------------------


def accumulates(world: World) -> None:
    """Two batches, gradients complete after the second; then the same on top of them."""
    stages = build("nested", world.size)
    model = whole(stages)
    pipe = pipeline(world, stages)
    for _ in range(2):
        for step in range(2):
            x, y = batch(9, step)
            mse(model(x), y).backward()
            pipe.step(x, target=y, finalize=step == 1)
        same_grads(pipe, model)


def weights_of_the_user(world: World) -> None:
    """Microbatches may count by tokens."""
    stages = build("plain", world.size)
    model = whole(stages)
    x, y = batch(8)
    counts = [1.0, 5.0, 2.0, 2.0]
    for i, count in enumerate(counts):
        part = slice(2 * i, 2 * i + 2)
        (mse(model(x[part]), y[part]) * count / 10).backward()
    pipe = pipeline(world, stages)
    pipe.step(x, target=y, weights=counts)
    same_grads(pipe, model)


def evaluates(world: World) -> None:
    """Any number of rows, between steps, without a trace."""
    stages = build("nested", world.size)
    model = whole(stages)
    pipe = pipeline(world, stages)
    for rows in (9, 1, 3, 12):
        x, y = batch(rows)
        output, loss = pipe(x), pipe.eval_step(x, target=y)
        if pipe.has_loss:
            torch.testing.assert_close(output, model(x))
            torch.testing.assert_close(loss, mse(model(x), y))
            assert not output.requires_grad
        else:
            assert output is None
        mse(model(x.repeat(4, 1)), y.repeat(4, 1)).backward()
        pipe.step(x.repeat(4, 1), target=y.repeat(4, 1))
    same_grads(pipe, model)


def recomputes(world: World) -> None:
    """Activation checkpointing of stages, also where backwards are split."""
    for schedule in ("1f1b", "zb-h1"):
        stages = build("plain", world.size)
        model = whole(stages)
        pipe = pipeline(world, stages, schedule=schedule, recompute=True)
        x, y = batch(9)
        mse(model(x), y).backward()
        pipe.step(x, target=y)
        same_grads(pipe, model)


class Embedding(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Head(Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def ties(world: World) -> None:
    """An embedding that is the output layer, too, on both ends."""
    torch.manual_seed(world.rank)  # the first owner's values count
    weight = nn.Parameter(torch.randn(7, 6).double())
    middle = build("plain", max(2, world.size - 1))[1:]
    stages = [Embedding(weight), *middle[: world.size - 2], Head(weight)]
    pipe = pipeline(world, stages, loss_fn=nn.CrossEntropyLoss())
    torch.manual_seed(0)
    shared = nn.Parameter(torch.randn(7, 6).double())
    model = nn.Sequential(Embedding(shared), *copy.deepcopy(stages[1:-1]), Head(shared))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    reference = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens, target = torch.randint(7, (2, 9), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), target)
        loss.backward()
        found = pipe.step(tokens, target=target, loss_everywhere=True)
        torch.testing.assert_close(found, loss.detach())
        if step < 2:  # the second step's gradients come on top of the first one's
            continue
        norm = ec.clip_grad_norm_(pipe, 0.5)
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(norm, expected.double())
        same_grads(pipe, model)
        optimizer.step()
        reference.step()
    if world.rank in (0, world.size - 1):
        stage = next(iter(pipe.stages.values()))
        torch.testing.assert_close(stage.weight, shared, rtol=1e-11, atol=1e-12)


class Noisy(nn.Module):
    """Batch statistics and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor, shift: float = 0.0) -> Tensor:
        return self.linear(self.norm(x)) * scale + shift


def counts_forwards(world: World) -> None:
    """A stage runs once a microbatch, on its own keyword arguments; nothing is tried out."""
    torch.manual_seed(0)
    stages = [Noisy().double() for _ in range(world.size)]
    plain = copy.deepcopy(stages)
    pipe = pipeline(world, stages)
    x, y = batch(8)
    scale = torch.linspace(1, 2, 8, dtype=torch.float64).view(8, 1)
    pipe.step(x, target=y, scale=scale, shift=0.5)
    for i in range(4):
        part = slice(2 * i, 2 * i + 2)
        value = x[part]
        for stage in plain:
            value = stage(value, scale[part], 0.5)
        (mse(value, y[part]) / 4).backward()
    (index,) = pipe.stages
    mine, expected = pipe.stages[index], plain[int(index)]
    assert mine.norm.num_batches_tracked == 4
    torch.testing.assert_close(mine.norm.running_mean, expected.norm.running_mean)
    torch.testing.assert_close(mine.linear.weight.grad, expected.linear.weight.grad)


def saves(world: World) -> None:
    """States have the keys of the whole model, and a whole one can be loaded."""
    stages = build("plain", world.size)
    model = whole(build("nested", world.size))
    pipe = pipeline(world, stages)
    keys = [key for key in model.state_dict() if key.startswith(f"{world.rank}.")]
    assert list(pipe.state_dict()) == keys
    pipe.load_state_dict(model.state_dict())
    for key, value in pipe.state_dict().items():
        assert torch.equal(value, model.state_dict()[key])


def survives(world: World) -> None:
    """After a stage has raised on every rank, the next step is right."""

    class Fails(nn.Module):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("too warm")
            return x

    stages = [nn.Sequential(stage, Fails()) for stage in build("plain", world.size)]
    Fails.fails = False
    model = whole(stages)
    pipe = pipeline(world, stages)
    x, y = batch(8)
    mse(model(x), y).backward()
    pipe.step(x, target=y)
    same_grads(pipe, model)


CHECKS = (
    accumulates,
    weights_of_the_user,
    evaluates,
    recomputes,
    ties,
    counts_forwards,
    saves,
    survives,
)


def every_check(world: World) -> None:
    for check in CHECKS:
        check(world)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_is_the_plain_model(kind: str, ranks: int) -> None:
    run_world(kind, every_check, ranks)


# --- refusals ------------------------------------------------------------------------------------


def refuses(world: World) -> None:
    stages = build("plain", world.size)
    for options, error, words in (
        ({"microbatches": 0}, ArgumentError, "microbatches is 0; give a whole number >= 1"),
        ({"microbatches": 2.5}, ArgumentError, "microbatches is 2.5"),
        ({"schedule": "2f2b"}, ArgumentError, "no schedule '2f2b'"),
        ({"schedule": "zb-v"}, ArgumentError, "zb-v"),
        ({"loss_reduction": "max"}, ArgumentError, "loss_reduction is 'max'"),
        ({"loss_fn": 3}, ArgumentError, "loss_fn is 3"),
        ({"recompute": 1}, ArgumentError, "recompute is 1"),
    ):
        with pytest.raises(error, match=words):
            pipeline(world, stages, **options)
    with pytest.raises(ArgumentError, match="stages"):
        pipeline(world, [*stages, *build("plain", 2)[:1]])
    missing = [None] * world.size
    with pytest.raises(ArgumentError, match=r"stage \d is None on rank"):
        pipeline(world, missing)
    pipe = pipeline(world, stages)
    x, y = batch(8)
    one = torch.tensor(1.0)
    for given, target, words in (
        ((), y, "rank 0 must provide input"),
        ((x,), None, "must provide a target"),
        ((one,), y, "at least 1 dimension"),
        ((x[:3],), y[:3], "3 rows for 4 microbatches"),
        ((x,), y[:7], "batches of different length"),
        (("text",), y, "no tensor"),
        ((x, x[:4]), y, r"lengths \[4, 8\]"),
    ):
        with pytest.raises(ArgumentError, match=words):
            pipe.step(*given, target=target)
    with pytest.raises(ArgumentError, match="weights are"):
        pipe.step(x, target=y, weights=[1.0])
    with pytest.raises(ArgumentError, match="needs a loss_fn"):
        pipeline(world, stages, loss_fn=None).step(x)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_what_cannot_be_done_is_refused_on_every_rank(kind: str) -> None:
    run_world(kind, refuses, 2)


def test_ranks_with_other_schedules_are_told() -> None:
    def main(world: World) -> None:
        with pytest.raises(ModelMismatch, match="schedule"):
            pipeline(world, build("plain", 2), schedule=["gpipe", "1f1b"][world.rank])

    ec.run(main, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_a_stage_ends_every_rank_with_its_place(kind: str) -> None:
    with pytest.raises(StageError, match=r"stage 1 raised ValueError for microbatch 2.*1F2.*warm"):
        run_world(kind, fails_in_the_middle, 2)


class FailsLater(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("too warm")
        return x


def fails_in_the_middle(world: World) -> None:
    stages = build("plain", 2)
    stages[1] = nn.Sequential(stages[1], FailsLater())
    x, y = batch(8)
    pipeline(world, stages).step(x, target=y)
