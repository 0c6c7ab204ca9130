"""What ranks hear when a step fails, and what a pipeline says to a plain training loop."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.launch.run import _enter, entered
from tests.worlds import KINDS, run_world

TIMEOUT_S = 30.0
X, Y = torch.ones(6, 2), torch.zeros(6, 2)


def pipeline(world: ec.World, stages: list[nn.Module], **options: Any) -> ec.Pipeline:
    loss_fn = nn.functional.mse_loss
    return ec.Pipeline(stages, world.group, microbatches=3, loss_fn=loss_fn, **options)


class FailsOnce(nn.Module):
    """Raises for the second microbatch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(2, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("boom")
        return self.layer(x)


def swallows(world: ec.World, failing: int, heard: dict[int, list[str]]) -> list[str]:
    if entered() is None:  # as ec.init does
        _enter(world)
    stages: list[nn.Module] = [nn.Linear(2, 2) for _ in range(world.size)]
    stages[failing] = FailsOnce()
    pipe = pipeline(world, stages)
    texts = heard[world.rank] = []
    for _ in range(2):
        try:
            pipe.step(X, target=Y)
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    with pytest.raises(ec.EchelonError):
        pipe.eval_step(X, target=Y)
    return texts


def heard_by_all(kind: str, failing: int) -> list[list[str]]:
    heard: dict[int, list[str]] = {}
    try:
        return run_world(kind, swallows, 3, (failing, heard), timeout=TIMEOUT_S)
    except ec.StageError:  # simulated ranks share one failure, which ec.run raises
        assert kind == "threads"
        return [heard[rank] for rank in range(3)]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_hears_the_first_failure_and_the_next_call_says_what_to_do(kind, failing):
    everyone = heard_by_all(kind, failing)
    for rank, (first, second) in enumerate(everyone):
        assert f"stage {failing} raised ValueError" in first, first
        assert first.startswith("StageError" if rank == failing else "RankFailed"), first
        assert second.startswith("StateError: an earlier step of this pipeline failed"), second
        assert f"stage {failing} raised ValueError" in second
        assert "start a new world" in second


def test_a_pipeline_on_one_rank_goes_on_after_a_failure():
    def main(world: ec.World) -> None:
        pipe = pipeline(world, [FailsOnce(), nn.Linear(2, 2)], schedule="looped-bfs")
        with pytest.raises(ec.StageError, match="boom"):
            pipe.step(X, target=Y)
        assert pipe.step(X, target=Y) is not None

    ec.run(main, 1)


# The first hour of somebody who knows a plain training loop ---------------------------------------


def linears(world: ec.World) -> ec.Pipeline:
    torch.manual_seed(0)
    return pipeline(world, [nn.Linear(2, 2) for _ in range(world.size)])


def every_rank_asks(world: ec.World) -> list[float]:
    pipe = linears(world)
    losses = [pipe.step(X, target=Y, loss_everywhere=True)]
    losses.append(pipe.eval_step(X, target=Y, loss_everywhere=True))
    (loss,) = [pipe.step(X, target=Y)]
    assert (loss is None) == (world.rank != world.size - 1)
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_that_asks_gets_the_loss(kind):
    everyone = run_world(kind, every_rank_asks, 3)
    assert everyone == [everyone[0]] * 3


def asks_none_for_a_loss(world: ec.World, call: str) -> None:
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
    usual = rf"pipe\.{call}\(\.\.\.\) gave None on this rank: the loss is on rank 1"
    assert re.search(says.get(call, usual), notes_of(caught.value))
    assert "loss_everywhere=True" in notes_of(caught.value)


def test_an_error_in_a_world_that_is_closed_by_a_with_block_says_it_too():
    def main(world: ec.World) -> str:
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


def calls_backward(world: ec.World) -> None:
    output = linears(world)(X)
    if output is not None:
        nn.functional.mse_loss(output, Y).backward()
    world.group.barrier()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_backward_of_what_a_pipeline_gave_says_what_to_do(kind):
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        run_world(kind, calls_backward, 2)
    assert "loss = pipe.step(x, target=y), which runs backward itself" in notes_of(caught.value)
