"""What a pipeline promises, in numbers, in every world and on 2, 3 and 4 ranks.

A start of a world proves all rows; each is a test that shows what its ranks found.
"""

import copy
import functools
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from tests.pipeline.models import Alive, Counted, batch, build, mse
from tests.worlds import KINDS, run_world

CLOSE = {"rtol": 1e-12, "atol": 1e-13}
NOT_REACHED = "not reached"

Row = Callable[[World], None]
ROWS: dict[int, dict[str, Row]] = {2: {}, 3: {}, 4: {}}


def row(*sizes: int) -> Callable[[Row], Row]:
    """Put a rank function into the list of rows that worlds of these sizes prove."""

    def put(fn: Row) -> Row:
        for size in sizes:
            ROWS[size][fn.__name__] = fn
        return fn

    return put


def prove_all(world: World) -> dict[str, str]:
    """What each row found on this rank; the first that fails is the last that runs."""
    rows = ROWS[world.size]
    found = dict.fromkeys(rows, NOT_REACHED)
    for name, fn in rows.items():
        try:
            fn(world)
        except Exception:
            found[name] = traceback.format_exc()
            break
        found[name] = "holds"
    return found


@functools.cache
def proven(kind: str, ranks: int) -> list[dict[str, str]]:
    return run_world(kind, prove_all, ranks)


def filled(stages: Iterable[nn.Module], world: World) -> list[nn.Module]:
    """A stage for each rank: these, and then some that do nothing."""
    stages = list(stages)
    return [*stages, *(nn.Identity() for _ in range(world.size - len(stages)))]


def pipeline(world: World, stages: list[nn.Module], **options: Any) -> ec.Pipeline:
    return ec.Pipeline(stages, world.group, **{"microbatches": 4, "loss_fn": mse, **options})


class Times(nn.Module):
    """``y = w * x``, or their inner product."""

    def __init__(self, *w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x if len(self.w) == 1 else (self.w * x).sum(-1, keepdim=True)


class Records(nn.Module):
    """Passes on what it is given, and writes it down."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, value: Any) -> Any:
        self.seen.append(value)
        return value


def computations(world: World, pipe: ec.Pipeline, rows: int) -> list[str]:
    """What this rank did in a step, as its events tell."""
    events: list[ec.events.Event] = []
    x, y = batch(rows)
    with ec.events.listen(events.append):
        pipe.step(x, target=y)
    ran = [e.facts for e in list(events) if e.name == "pipeline.action"]
    return [str(f["action"]) for f in ran if f["rank"] == world.rank and str(f["kind"]) in "FB"]


# --- forward -------------------------------------------------------------------------------------


@row(2, 3, 4)
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


@row(2, 3, 4)
def every_shape_dtype_and_nesting_arrives_as_it_was_sent(world: World) -> None:
    dtypes = (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.bool,
    )
    shapes: list[list[int]] = [[], [0, 3], [2, 3], [2, 3, 4, 5], [70, 80]]
    generator = torch.Generator().manual_seed(0)
    tensors = [
        (8 * torch.randn(shape, generator=generator)).to(dtype)
        for shape in shapes
        for dtype in dtypes
    ]
    value = {"all": tensors, "pair": (tensors[2], [{"text": "x", "none": None}, 1.5, True])}
    scale = torch.ones((), dtype=torch.float64)

    class Gives(Times):
        def forward(self, x: Tensor) -> Any:
            strided = x.expand(-1, 6)[:, ::2].t()  # neither whole nor contiguous
            return {"x": self.w * x, "strided": strided, "value": value, "scale": scale * self.w[0]}

    class Checks(nn.Module):
        num_seen = 0

        def forward(self, given: dict[str, Any]) -> Any:
            got, expected = given["value"], value
            assert got["pair"][1] == expected["pair"][1]
            assert type(got["pair"]) is tuple
            for one, other in zip(
                [*got["all"], got["pair"][0]], [*tensors, tensors[2]], strict=True
            ):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                assert torch.equal(one, other)
            assert torch.equal(given["strided"][0], given["strided"][2])
            assert not given["strided"].requires_grad
            assert given["x"].requires_grad
            self.num_seen += 1
            return given

    def loss(given: dict[str, Any], target: Tensor) -> Tensor:
        return (given["x"] * given["scale"] * given["strided"][0][:, None]).sum()

    stages = [Gives(3.0), *(Checks() for _ in range(world.size - 1))]
    pipe = pipeline(world, stages, loss_fn=loss, loss_reduction="sum")
    x = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None]
    for _ in range(2):  # the second time, both sides know what comes
        pipe.step(x, target=x)
    (stage,) = pipe.stages.values()
    if world.rank == 0:
        assert stage.w.grad.item() == 2 * 2 * 3 * x.square().sum().item()
    else:
        assert stage.num_seen == 8


@row(2)
def microbatches_differ_by_one_row_at_most(world: World) -> None:
    seen = Records()
    pipe = pipeline(world, filled([seen], world))
    x = torch.arange(1.0, 11.0)[:, None]
    pipe(x)
    if world.rank == 0:
        assert [part.flatten().tolist() for part in seen.seen] == [
            [1, 2, 3],
            [4, 5, 6],
            [7, 8],
            [9, 10],
        ]
    with pytest.raises(ArgumentError, match="3 rows for 4 microbatches: give a larger batch or"):
        pipe.step(x[:3], target=x[:3])


# --- backward ------------------------------------------------------------------------------------


@row(2)
def unequal_microbatches_give_the_gradient_of_the_whole_batch(world: World) -> None:
    for microbatches in (1, 2, 4, 5):
        stages = filled([Times(2.0), Times(3.0)], world)
        pipe = pipeline(
            world, stages, microbatches=microbatches, loss_fn=lambda y, _: y.square().mean()
        )
        x = torch.arange(1.0, 11.0, dtype=torch.float64)[:, None]
        loss = pipe.step(x, target=x, loss_everywhere=True)
        assert loss is not None
        torch.testing.assert_close(loss.item(), 36 * 38.5, **CLOSE)
        (stage,) = pipe.stages.values()
        if world.rank < 2:
            torch.testing.assert_close(stage.w.grad.item(), [1386.0, 924.0][world.rank], **CLOSE)


@row(2)
def one_microbatch_and_four_give_equal_gradients(world: World) -> None:
    grads = []
    for microbatches in (1, 4):
        pipe = pipeline(world, build("plain", world.size), microbatches=microbatches)
        x, y = batch(10)
        pipe.step(x, target=y)
        grads.append([param.grad for param in pipe.parameters()])
    torch.testing.assert_close(*grads, **CLOSE)


@row(2)
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


@row(2, 3, 4)
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


# --- schedules -----------------------------------------------------------------------------------


@row(2, 3, 4)
def gpipe_does_all_forwards_and_then_all_backwards(world: World) -> None:
    graphs = Alive()
    stages = [Counted(block, graphs) for block in build("plain", world.size)]
    pipe = pipeline(world, stages, schedule="gpipe")
    ran = computations(world, pipe, 8)
    assert ran[:4] == [f"{world.rank}F{i}" for i in range(4)]
    assert sorted(ran[4:]) == [f"{world.rank}B{i}" for i in range(4)]
    assert graphs.most == pipe.most_alive == 4
    assert graphs.now == 0


@row(2, 3, 4)
def one_f_one_b_keeps_as_many_microbatches_as_there_are_ranks_after_it(world: World) -> None:
    grads = []
    for schedule, most in (("gpipe", 8), ("1f1b", min(8, world.size - world.rank))):
        graphs = Alive()
        stages = [Counted(block, graphs) for block in build("plain", world.size)]
        pipe = pipeline(world, stages, schedule=schedule, microbatches=8)
        computations(world, pipe, 17)
        assert graphs.most == pipe.most_alive == most
        grads.append([param.grad for param in pipe.parameters()])
    torch.testing.assert_close(*grads, **CLOSE)


@row(2)
def one_f_one_b_of_two_stages_and_four_microbatches_is_the_known_order(world: World) -> None:
    group = world.group.subgroup([0, 1])
    if group is None:
        return
    pipe = ec.Pipeline(build("plain", 2), group, microbatches=4, schedule="1f1b", loss_fn=mse)
    order = [["F0 F1 B0 F2 B1 F3 B2 B3"], ["F0 B0 F1 B1 F2 B2 F3 B3"]][world.rank][0]
    assert computations(world, pipe, 8) == [f"{world.rank}{one}" for one in order.split()]


@row(2)
def a_pipeline_shows_its_schedule_its_microbatches_and_its_stages(world: World) -> None:
    stages = build("plain", world.size)
    pipe = pipeline(world, stages, schedule="gpipe")
    assert (pipe.schedule.name, pipe.schedule.num_microbatches) == ("gpipe", 4)
    assert list(pipe.stages.values()) == [stages[world.rank]]
    assert f"schedule='gpipe', stages={world.size}, microbatches=4" in repr(pipe)
    assert type(stages[world.rank]).__name__ in repr(pipe)
    modes = [stages[world.rank].training]
    for mode in (pipe.eval, pipe.train):
        mode()
        modes.append(stages[world.rank].norm.training)
    assert modes == [True, False, True]


# --- refusals ------------------------------------------------------------------------------------


@row(2)
def sizes_that_make_no_pipeline_are_refused(world: World) -> None:
    stages = build("plain", 2)
    with pytest.raises(ArgumentError, match=r"^microbatches is 0; give a whole number >= 1"):
        pipeline(world, stages, microbatches=0)
    alone = world.group.subgroup([0])
    if alone is not None:
        with pytest.raises(ArgumentError, match=r"^world size must be >= 2: .*Start 2 ranks"):
            ec.Pipeline(stages, alone, microbatches=2, schedule="1f1b")


@row(2, 3, 4)
def a_first_rank_without_input_is_an_error_on_every_rank(world: World) -> None:
    """At once, and the next step is right."""
    stages = build("plain", world.size)
    pipe = pipeline(world, stages)
    x, y = batch(8)
    with pytest.raises(ArgumentError, match="Pipeline: rank 0 must provide input"):
        pipe.step(*([] if world.rank == 0 else [x]), target=y)
    loss = pipe.step(x, target=y, loss_everywhere=True)
    assert loss is not None
    model = nn.Sequential(*stages)
    torch.testing.assert_close(loss, mse(model(x), y).detach(), **CLOSE)


@row(2)
def an_input_without_dimensions_is_an_error_on_every_rank(world: World) -> None:
    pipe = pipeline(world, build("plain", world.size))
    with pytest.raises(ArgumentError, match="input tensor must have at least 1 dimension"):
        pipe.step(torch.tensor(1.0), target=batch(8)[1])


@pytest.mark.parametrize(("ranks", "name"), [(size, name) for size in ROWS for name in ROWS[size]])
@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_that(kind: str, ranks: int, name: str) -> None:
    for found in proven(kind, ranks):
        assert found[name] == "holds", found[name]
