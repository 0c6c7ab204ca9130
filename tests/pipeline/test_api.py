"""What a user of a pipeline can do besides the plain step, and what is refused."""

import copy
import itertools
import re

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.pipeline.models import CLOSE, Records, Times, batch, build, each, filled, mse, pipeline
from tests.worlds import KINDS, NCCL_RULES, run_world


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


def leaves_targets_out(world: World) -> None:
    """Microbatches count by their targets, with gradients and without; one has none."""
    x, _ = batch(9)
    target = torch.tensor([0, 1, -100, -100, -100, 2, -100, 3, 4])
    counts = [2, 0, 1, 2]

    def mean_over_targets(output: Tensor, target: Tensor) -> Tensor:  # NaN, and its gradients, too
        is_target = target >= 0
        return (output.logsumexp(1) * is_target).sum() / is_target.sum()

    losses = (nn.functional.cross_entropy, mean_over_targets)
    for schedule, loss_fn in itertools.product(("1f1b", "zb-h1"), losses):
        stages = build("plain", world.size)
        model = whole(stages)
        loss = loss_fn(model(x), target)
        loss.backward()
        pipe = pipeline(world, stages, schedule=schedule, loss_fn=loss_fn)
        for call in (pipe.eval_step, pipe.step):
            found = call(x, target=target, weights=counts, loss_everywhere=True)
            torch.testing.assert_close(found, loss.detach())
        few = pipe.eval_step(x[1:4], target=target[1:4], weights=[1, 0, 0], loss_everywhere=True)
        torch.testing.assert_close(few, loss_fn(model(x[1:2]), target[1:2]))
        same_grads(pipe, model)


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * mse(output, target)


def losses_are_modules(world: World) -> None:
    """With a buffer, or with a parameter that is frozen; they are in no state."""
    x, y = batch(8)
    for loss_fn, target in (
        (nn.CrossEntropyLoss(weight=y[0].abs()), torch.arange(8) % 2),
        (nn.BCEWithLogitsLoss(pos_weight=y[0].abs()), y.sigmoid()),
        (Scaled().requires_grad_(False), y),
    ):
        stages = build("plain", world.size)
        model = whole(stages)
        pipe = pipeline(world, stages, microbatches=1, loss_fn=loss_fn)
        loss = loss_fn(model(x), target)
        loss.backward()
        found = pipe.step(x, target=target, loss_everywhere=True)
        torch.testing.assert_close(found, loss.detach())
        same_grads(pipe, model)
        pipe.load_state_dict(model.state_dict())
        assert pipe.whole_state_dict().keys() == model.state_dict().keys()


def trains_only_where_there_are_targets(world: World) -> None:
    """The loss of the other microbatches depends on nothing."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) if target.any() else torch.tensor(0.0)

    x, y = batch(8)
    y[2:6] = 0
    stages = build("plain", world.size)
    model = whole(stages)
    (sum(loss_fn(model(x[i : i + 2]), y[i : i + 2]) for i in range(0, 8, 2)) / 4).backward()
    pipe = pipeline(world, stages, loss_fn=loss_fn)
    pipe.step(x, target=y)
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


def outputs_are_those_of_the_unsplit_model(world: World) -> None:
    """On the last rank: one output for each microbatch, which together are the whole."""
    stages = build("nested", world.size)
    model = nn.Sequential(*copy.deepcopy(stages))
    outputs = Records()
    stages[-1] = nn.Sequential(stages[-1], outputs)
    pipe = pipeline(world, stages)
    x, _ = batch(10)
    found = pipe(*([x] if world.rank == 0 else []))
    if world.rank < world.size - 1:
        assert found is None
        return
    assert len(outputs.seen) == 4
    assert torch.equal(found, torch.cat(outputs.seen))
    torch.testing.assert_close(found, model(x).detach(), **CLOSE)


def a_gradient_of_the_output_reaches_the_first_stage_as_it_was_given(world: World) -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    for stages, given, expected in (
        ([Times(1.0, 1.0)], [5.0], [15.0, 20.0]),
        ([Times(1.0), Times(2.0)], [5.0, 7.0], [2 * (3.0 * 5.0 + 4.0 * 7.0)]),  # of two numbers
    ):
        seed = torch.tensor([given], dtype=torch.float64)
        pipe = pipeline(
            world,
            filled(stages, world),
            microbatches=1,
            loss_fn=lambda y, target: (y * target).sum(),
            loss_reduction="sum",
        )
        pipe.step(x, target=seed)
        if world.rank == 0:
            assert pipe.stages["0"].w.grad.tolist() == expected


def gradients_have_the_shape_and_the_values_of_what_they_belong_to(world: World) -> None:
    """Widths 4, 8, 2: every stage is given the gradient of its own output."""
    torch.manual_seed(0)
    stages = filled([nn.Linear(4, 8).double(), nn.Linear(8, 2).double()], world)
    model = nn.Sequential(*copy.deepcopy(stages))
    pipe = pipeline(world, stages, microbatches=3)
    x, _ = batch(6)
    x, y = x[:, :4], x[:, 4:]
    came: list[Tensor] = []
    (stage,) = pipe.stages.values()
    stage.register_forward_hook(lambda *call: call[2].register_hook(came.append) and None)
    pipe.step(x, target=y)
    outputs: list[Tensor] = []
    value = x
    for layer in model:
        value = layer(value)
        value.retain_grad()
        outputs.append(value)
    mse(value, y).backward()
    width = 8 if world.rank == 0 else 2
    assert [tuple(grad.shape) for grad in came] == [(2, width)] * 3
    torch.testing.assert_close(torch.cat(came), outputs[world.rank].grad, **CLOSE)
    for mine, plain in zip(stage.parameters(), model[world.rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, **CLOSE)


CHECKS = (
    accumulates,
    weights_of_the_user,
    leaves_targets_out,
    losses_are_modules,
    trains_only_where_there_are_targets,
    evaluates,
    recomputes,
    ties,
    counts_forwards,
    survives,
    outputs_are_those_of_the_unsplit_model,
    a_gradient_of_the_output_reaches_the_first_stage_as_it_was_given,
    gradients_have_the_shape_and_the_values_of_what_they_belong_to,
)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", [*KINDS, NCCL_RULES])
def test_a_pipeline_is_the_plain_model(kind: str, ranks: int) -> None:
    run_world(kind, each, ranks, (CHECKS,))


# --- for a user who knows a plain training loop --------------------------------------------------

X, Y = torch.ones(6, 2), torch.zeros(6, 2)


def linears(world: World) -> ec.Pipeline:
    torch.manual_seed(0)
    return pipeline(world, [nn.Linear(2, 2) for _ in range(world.size)], microbatches=3)


def every_rank_asks(world: World) -> list[float]:
    pipe = linears(world)
    losses = [pipe.step(X, target=Y, loss_everywhere=True)]
    losses.append(pipe.eval_step(X, target=Y, loss_everywhere=True))
    (loss,) = [pipe.step(X, target=Y)]
    assert (loss is None) == (world.rank != world.size - 1)
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("kind", [*KINDS, NCCL_RULES])
def test_every_rank_that_asks_gets_the_loss(kind):
    everyone = run_world(kind, every_rank_asks, 3)
    assert everyone == [everyone[0]] * 3


def asks_none_for_a_loss(world: World, call: str) -> None:
    pipe = linears(world)
    if call == "forward":
        output = pipe(X)
        nn.functional.mse_loss(output, Y).item()
    elif call == "eval_step":
        float(pipe.eval_step(X, target=Y))
    else:
        print(pipe.step(X, target=Y).item())
    world.group.barrier()


def notes_of(error: BaseException) -> str:
    return " ".join(error.__notes__)


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("call", ["step", "eval_step", "forward"])
def test_an_error_that_comes_of_no_loss_says_where_the_loss_is(kind, call):
    with pytest.raises((AttributeError, TypeError)) as caught:
        run_world(kind, asks_none_for_a_loss, 2, (call,))
    says = {
        "forward": r"pipe\(\.\.\.\) gives the output of the model on rank 1 .* and None elsewhere",
    }
    usual = rf"pipe\.{call}\(\.\.\.\) gives the loss on rank 1 of the pipeline, .* None elsewhere"
    assert re.search(says.get(call, usual), notes_of(caught.value))
    assert "loss_everywhere=True" in notes_of(caught.value)


def test_an_error_in_a_world_that_is_closed_by_a_with_block_says_it_too():
    def main(world: World) -> str:
        if world.rank == 0:
            error = AttributeError("'NoneType' object has no attribute 'item'")
            linears(world).step(X, target=Y)
            world.explain(error)
            world.explain(error)  # once is enough
            return notes_of(error)
        linears(world).step(X, target=Y)
        return ""

    first, _ = ec.run(main, 2)
    assert first.count("loss_everywhere=True") == 1


def calls_backward(world: World) -> None:
    output = linears(world)(X)
    if output is not None:
        nn.functional.mse_loss(output, Y).backward()
    world.group.barrier()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_backward_of_what_a_pipeline_gave_says_what_to_do(kind):
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        run_world(kind, calls_backward, 2)
    assert "loss = pipe.step(x, target=y), which runs backward itself" in notes_of(caught.value)


def test_a_schedule_without_a_backward_evaluates_and_does_not_train() -> None:
    def main(world: ec.World) -> float | None:
        stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
        options = {"microbatches": 2, "schedule": "forward-only", "loss_fn": nn.MSELoss()}
        pipe = ec.Pipeline(stages, world.group, **options)
        x, y = torch.ones(8, 4), torch.zeros(8, 1)
        with pytest.raises(ec.ArgumentError, match="'forward-only' has no backward: use eval_step"):
            pipe.step(x, target=y)
        loss = pipe.eval_step(x, target=y)
        return None if loss is None else loss.item()

    first, last = ec.run(main, 2)
    assert first is None
    assert last is not None


def test_a_loss_with_parameters_that_would_not_be_trained_is_refused() -> None:
    def main(world: World) -> None:
        with pytest.raises(ec.ArgumentError, match=r"^loss_fn is a Scaled with param"):
            pipeline(world, build("plain", 2), loss_fn=Scaled())

    ec.run(main, 2)
