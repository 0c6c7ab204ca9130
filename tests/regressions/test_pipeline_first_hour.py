"""What somebody who knows a plain training loop tries first with a pipeline."""

import re

import pytest
import torch
from torch import nn

import echelon as ec
from tests.worlds import run_world


def pipeline(world: ec.World) -> ec.Pipeline:
    torch.manual_seed(0)
    stages = [nn.Linear(2, 2) for _ in range(world.size)]
    return ec.Pipeline(stages, world.group, microbatches=2, loss_fn=nn.functional.mse_loss)


X, Y = torch.ones(4, 2), torch.zeros(4, 2)


def every_rank_asks(world: ec.World) -> list[float]:
    pipe = pipeline(world)
    losses = [pipe.step(X, target=Y, loss_everywhere=True)]
    losses.append(pipe.eval_step(X, target=Y, loss_everywhere=True))
    (loss,) = [pipe.step(X, target=Y)]
    assert (loss is None) == (world.rank != world.size - 1)
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_every_rank_that_asks_gets_the_loss(kind):
    everyone = run_world(kind, every_rank_asks, 3)
    assert everyone == [everyone[0]] * 3


def asks_none_for_a_loss(world: ec.World, call: str) -> None:
    pipe = pipeline(world)
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
    usual = rf"pipe\.{call}\(\.\.\.\) gave None on this rank: the loss is on rank 1"
    assert re.search(says.get(call, usual), notes_of(caught.value))
    assert "loss_everywhere=True" in notes_of(caught.value)


def test_an_error_in_a_world_that_is_closed_by_a_with_block_says_it_too():
    def main(world: ec.World) -> str:
        if world.rank == 0:
            error = AttributeError("'NoneType' object has no attribute 'item'")
            pipeline(world).step(X, target=Y)
            world.explain(error)
            world.explain(error)  # once is enough
            return notes_of(error)
        pipeline(world).step(X, target=Y)
        return ""

    first, _ = ec.run(main, 2)
    assert first.count("loss_everywhere=True") == 1


def calls_backward(world: ec.World) -> None:
    output = pipeline(world)(X)
    if output is not None:
        nn.functional.mse_loss(output, Y).backward()
    world.group.barrier()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_backward_of_what_a_pipeline_gave_says_what_to_do(kind):
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        run_world(kind, calls_backward, 2)
    assert "loss = pipe.step(x, target=y), which runs backward itself" in notes_of(caught.value)
