"""Actions run in the order of the schedule, and every rank hears of a step that fails."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StageError
from echelon.launch.run import enter, entered
from echelon.pipeline.stage import Stage
from tests.pipeline.models import CLOSE, Alive, Counted, batch, build, each, mse, pipeline
from tests.worlds import KINDS, NCCL_RULES, run_world

TIMEOUT_S = 30.0
X, Y = torch.ones(6, 2), torch.zeros(6, 2)


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
        enter(world)
    stages: list[nn.Module] = [nn.Linear(2, 2) for _ in range(world.size)]
    stages[failing] = FailsOnce()
    pipe = pipeline(world, stages, microbatches=3)
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
        assert kind in ("threads", NCCL_RULES)
        return [heard[rank] for rank in range(3)]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("kind", [*KINDS, NCCL_RULES])
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
        pipe = pipeline(world, stages, microbatches=3, schedule="looped-bfs")
        with pytest.raises(ec.StageError, match="boom"):
            pipe.step(X, target=Y)
        assert pipe.step(X, target=Y) is not None

    ec.run(main, 1)


# --- errors of a stage ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, NCCL_RULES])
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


class Gives(nn.Module):
    """Something else than what came."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


def steps(world: World, first: nn.Module, last: nn.Module) -> None:
    stages = build("plain", 2)
    stages = [nn.Sequential(stages[0], first), nn.Sequential(stages[1], last)]
    pipe = ec.Pipeline(stages, world.group, microbatches=2, loss_fn=mse)
    x, y = batch(8)
    pipe.step(x, target=y)


@pytest.mark.parametrize(
    ("make", "is_last", "sentence"),
    [
        (lambda x: object(), False, "stage 0 raised ArgumentError for microbatch 0, in action 0F0"),
        (lambda x: object(), False, r"gave a object .*register the class with torch.utils._pytree"),
        (lambda x: "text", False, "stage 1 raised .* for microbatch 0, in action 1F0"),
        (lambda x: {"y": x}, True, "stage 1 raised TypeError for microbatch 0, in action 1F0"),
        (lambda x: None, True, "stage 1 raised TypeError for microbatch 0, in action 1F0"),
    ],
)
def test_an_output_that_is_no_tensor_where_one_is_needed_is_named(make, is_last, sentence) -> None:
    same, other = nn.Identity(), Gives(make)
    with pytest.raises(StageError, match=sentence):
        ec.run(steps, 2, args=(same, other) if is_last else (other, same))


@pytest.mark.parametrize("loss", [3.0, "text", None, torch.ones(2, requires_grad=True)])
def test_a_loss_that_is_not_one_number_is_named(loss: Any) -> None:
    def main(world: World) -> None:
        pipe = ec.Pipeline(
            build("plain", 2), world.group, microbatches=2, loss_fn=lambda y, target: loss
        )
        x, y = batch(8)
        pipe.step(x, target=y)

    with pytest.raises(StageError, match=r"1F0: loss_fn gave .*must give a tensor with one number"):
        ec.run(main, 2)


def trains_nothing(world: World, stages: list[nn.Module], loss_fn: Callable[..., Tensor]) -> None:
    pipe = pipeline(world, stages, loss_fn=loss_fn)
    x, y = batch(8)
    pipe.eval_step(x, target=y)
    pipe.step(x, target=y)
    pipe.eval_step(x, target=y)


@pytest.mark.parametrize("kind", [*KINDS, NCCL_RULES])
def test_a_loss_that_trains_nothing_is_refused_like_the_backward_of_one_process(kind: str) -> None:
    detached = [*build("plain", 1), nn.Sequential(Gives(Tensor.detach))]
    frozen = [stage.requires_grad_(False) for stage in build("plain", 2)]
    for stages, loss_fn in ((build("plain", 2), mse_of_values), (detached, mse), (frozen, mse)):
        with pytest.raises(ArgumentError, match="the loss depends on nothing that requires a grad"):
            run_world(kind, trains_nothing, 2, (stages, loss_fn))


def mse_of_values(output: Tensor, target: Tensor) -> Tensor:
    return mse(output.detach(), target)


def test_an_error_of_a_stage_lists_its_last_20_actions() -> None:
    class Later(nn.Module):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            if self.num_calls == 12:
                raise ValueError("too warm")
            return x

    def main(world: World) -> None:
        stages = build("plain", 2)
        stages[1] = nn.Sequential(stages[1], Later())
        pipe = ec.Pipeline(stages, world.group, microbatches=12, loss_fn=mse)
        x, y = batch(12)
        pipe.step(x, target=y)

    with pytest.raises(StageError, match="stage 1 raised ValueError for microbatch 11") as info:
        ec.run(main, 2)
    listed = str(info.value).partition("Its last actions: ")[2].split()
    assert len(listed) == 20
    assert {"1F10", "1B10"} <= {*listed}
    assert "1F0" not in listed
    assert (info.value.stage, info.value.microbatch) == (1, 11)


def test_a_step_after_which_a_slot_is_not_empty_fails_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stage, "num_alive", 1)  # the stage says that it holds a microbatch

    def main(world: World) -> bool:
        targets: list[weakref.ref[Tensor]] = []

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            targets.append(weakref.ref(target))
            return mse(output, target)

        pipe = ec.Pipeline([nn.Linear(2, 2)], world.group, microbatches=2, loss_fn=loss_fn)
        with pytest.raises(AssertionError):
            pipe.step(X, target=Y)
        gc.collect()
        return [target() for target in targets] == [None, None]

    assert ec.run(main, 1) == [True]


# --- the order of actions ------------------------------------------------------------------------


def computations(world: World, pipe: ec.Pipeline, rows: int) -> list[str]:
    """What this rank did in a step, as its events tell."""
    events: list[ec.events.Event] = []
    x, y = batch(rows)
    with ec.events.listen(events.append):
        pipe.step(x, target=y)
    ran = [e.facts for e in list(events) if e.name == "pipeline.action"]
    return [str(f["action"]) for f in ran if f["rank"] == world.rank and str(f["kind"]) in "FB"]


def gpipe_does_all_forwards_and_then_all_backwards(world: World) -> None:
    graphs = Alive()
    stages = [Counted(block, graphs) for block in build("plain", world.size)]
    pipe = pipeline(world, stages, schedule="gpipe")
    ran = computations(world, pipe, 8)
    assert ran[:4] == [f"{world.rank}F{i}" for i in range(4)]
    assert sorted(ran[4:]) == [f"{world.rank}B{i}" for i in range(4)]
    assert graphs.most == pipe.most_alive == 4
    assert graphs.now == 0


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


def one_f_one_b_of_two_stages_and_four_microbatches_is_the_known_order(world: World) -> None:
    group = world.group.subgroup([0, 1])
    if group is None:
        return
    pipe = ec.Pipeline(build("plain", 2), group, microbatches=4, schedule="1f1b", loss_fn=mse)
    order = [["F0 F1 B0 F2 B1 F3 B2 B3"], ["F0 B0 F1 B1 F2 B2 F3 B3"]][world.rank][0]
    assert computations(world, pipe, 8) == [f"{world.rank}{one}" for one in order.split()]


ORDERS = (
    gpipe_does_all_forwards_and_then_all_backwards,
    one_f_one_b_keeps_as_many_microbatches_as_there_are_ranks_after_it,
    one_f_one_b_of_two_stages_and_four_microbatches_is_the_known_order,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"), [("threads", 2), ("threads", 4), ("processes", 3), ("gloo", 2)]
)
def test_actions_run_in_the_order_of_the_schedule(kind: str, ranks: int) -> None:
    run_world(kind, each, ranks, (ORDERS,))
