"""A batch is split into microbatches that count as the whole, or refused on every rank."""

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from tests.pipeline.models import (
    CLOSE,
    Records,
    Times,
    batch,
    build,
    each,
    filled,
    mse,
    pipeline,
)
from tests.worlds import run_world


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


def one_microbatch_and_four_give_equal_gradients(world: World) -> None:
    grads = []
    for microbatches in (1, 4):
        pipe = pipeline(world, build("plain", world.size), microbatches=microbatches)
        x, y = batch(10)
        pipe.step(x, target=y)
        grads.append([param.grad for param in pipe.parameters()])
    torch.testing.assert_close(*grads, **CLOSE)


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


def an_input_without_dimensions_is_an_error_on_every_rank(world: World) -> None:
    pipe = pipeline(world, build("plain", world.size))
    with pytest.raises(ArgumentError, match="input tensor must have at least 1 dimension"):
        pipe.step(torch.tensor(1.0), target=batch(8)[1])


def batches_that_cannot_be_used_are_refused(world: World) -> None:
    stages = build("plain", world.size)
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
        (
            (x, x[:4]),
            y,
            r"input\[1\] of shape \[4, 6\] has dim 0 of length 4, and the batch has 8 rows",
        ),
    ):
        with pytest.raises(ArgumentError, match=words):
            pipe.step(*given, target=target)
    with pytest.raises(ArgumentError, match="weights are"):
        pipe.step(x, target=y, weights=[1.0])
    with pytest.raises(ArgumentError, match="needs a loss_fn"):
        pipeline(world, stages, loss_fn=None).step(x)


CHECKS = (
    microbatches_differ_by_one_row_at_most,
    unequal_microbatches_give_the_gradient_of_the_whole_batch,
    one_microbatch_and_four_give_equal_gradients,
    a_first_rank_without_input_is_an_error_on_every_rank,
    an_input_without_dimensions_is_an_error_on_every_rank,
    batches_that_cannot_be_used_are_refused,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"), [("threads", 2), ("threads", 4), ("processes", 3), ("gloo", 2)]
)
def test_microbatches_are_the_whole_batch_or_it_is_refused(kind: str, ranks: int) -> None:
    run_world(kind, each, ranks, (CHECKS,))


@pytest.mark.parametrize(
    "weights",
    [3, "ab", ["a", "b"], [1.0] * 3, [1.0, -1.0], [0, 0], [float("nan"), 1.0], [None, 1.0]],
)
def test_weights_that_are_none_are_refused_on_every_rank(weights: Any) -> None:
    def main(world: World) -> None:
        pipe = ec.Pipeline(build("plain", 2), world.group, microbatches=2, loss_fn=mse)
        x, y = batch(8)
        given = {"weights": weights} if pipe.has_loss else {}
        with pytest.raises(ArgumentError, match=r"weights are .*one number >= 0 for each of the 2"):
            pipe.step(x, target=y, **given)
        with pytest.raises(ArgumentError, match=r"weights are .*one number >= 0 for each of the 1"):
            pipe.eval_step(x[:1], target=y[:1], **given)
        pipe.step(x, target=y)

    ec.run(main, 2)


def test_what_ranks_without_use_for_it_are_given_is_not_looked_at() -> None:
    def main(world: World) -> list[float]:
        pipe = ec.Pipeline(build("plain", 2), world.group, microbatches=2, loss_fn=mse)
        x, y = batch(8)
        found = []
        for others in (None, x[:1], torch.tensor(1.0), "text"):
            mine, target = (x, others) if pipe.has_input else (others, y)
            loss = pipe.step(mine, target=target, loss_everywhere=True)
            found.append(loss.item())
        return found

    (found, again) = ec.run(main, 2)
    assert found == again
    assert len(set(found)) == 1


def test_weights_may_come_one_by_one() -> None:
    def main(world: World) -> bool:
        pipe = ec.Pipeline(build("plain", 2), world.group, microbatches=2, loss_fn=mse)
        x, y = batch(8)
        one = pipe.step(x, target=y, weights=[1, 3], loss_everywhere=True)
        return torch.equal(pipe.step(x, target=y, weights=iter([1, 3]), loss_everywhere=True), one)

    assert ec.run(main, 2) == [True, True]


def test_a_step_where_nothing_has_gradients_is_refused() -> None:
    def main(world: World) -> None:
        pipe = ec.Pipeline(build("plain", 2), world.group, microbatches=2, loss_fn=mse)
        x, y = batch(8)
        with torch.inference_mode():
            with pytest.raises(ArgumentError, match=r"under torch.inference_mode\(\) nothing has"):
                pipe.step(x, target=y)
            pipe.eval_step(x, target=y)
        pipe.step(x, target=y)

    ec.run(main, 2)


def test_a_batch_that_cannot_be_cut_is_refused_on_every_rank() -> None:
    def main(world: World) -> str:
        pipe = ec.Pipeline(build("plain", 2), world.group, microbatches=2, loss_fn=mse)
        x, y = batch(8)
        with pytest.raises(
            ArgumentError, match=r"is torch.sparse_coo, which cannot be cut"
        ) as info:
            pipe.step(x.to_sparse(), target=y)
        return str(info.value)

    ec.run(main, 2)


class WritesIntoItsInput(nn.Module):
    """Scales what it is given, in place, before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.view(-1)[0].mul_(0.5)
        return x * self.weight


def gradient_of_a_stage_that_writes(world: World) -> list[float]:
    stages = [WritesIntoItsInput(), nn.Linear(1, 1)]
    pipe = ec.Pipeline(stages, world.group, microbatches=2, loss_fn=mse, schedule="gpipe")
    x = torch.tensor([[4.0], [1.0], [6.0], [1.0]])
    pipe.step(x, target=torch.zeros(4, 1))
    assert x.flatten().tolist() == [2.0, 1.0, 3.0, 1.0] or world.rank > 0
    return [float(param.grad.abs().sum()) for param in pipe.parameters() if param.grad is not None]


def test_a_forward_may_write_into_its_microbatch() -> None:
    assert all(sum(found) > 0 for found in ec.run(gradient_of_a_stage_that_writes, 2))
