"""A StageError that user code swallows: nobody waits, and every rank hears the first failure."""

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.launch.run import _enter, entered
from tests.worlds import run_world

TIMEOUT_S = 30.0


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
    pipe = ec.Pipeline(stages, world.group, microbatches=3, loss_fn=nn.functional.mse_loss)
    texts = heard[world.rank] = []
    for _ in range(2):
        try:
            pipe.step(torch.ones(6, 2), target=torch.zeros(6, 2))
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    with pytest.raises(ec.EchelonError):
        pipe.eval_step(torch.ones(6, 2), target=torch.zeros(6, 2))
    return texts


def heard_by_all(kind: str, failing: int) -> list[list[str]]:
    heard: dict[int, list[str]] = {}
    try:
        return run_world(kind, swallows, 3, (failing, heard), timeout=TIMEOUT_S)
    except ec.StageError:  # simulated ranks share one failure, which ec.run raises
        assert kind == "threads"
        return [heard[rank] for rank in range(3)]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
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
        stages = [FailsOnce(), nn.Linear(2, 2)]
        pipe = ec.Pipeline(
            stages,
            world.group,
            microbatches=3,
            loss_fn=nn.functional.mse_loss,
            schedule="looped-bfs",
        )
        with pytest.raises(ec.StageError, match="boom"):
            pipe.step(torch.ones(6, 2), target=torch.zeros(6, 2))
        assert pipe.step(torch.ones(6, 2), target=torch.zeros(6, 2)) is not None

    ec.run(main, 1)
