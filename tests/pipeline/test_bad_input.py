"""What cannot be used is named with its place; the rest of it is in ``test_promises``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, ScheduleError, StageError
from echelon.pipeline.arguments import check_devices
from tests.pipeline.models import batch, build, mse


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


@pytest.mark.parametrize(
    ("orders", "place", "sentence"),
    [
        # Breaks order: a backward before its forward.
        (["0F0,0B0", "1B0,1F0"], (1, 0, "1B0"), "1F0"),
        # Forgets an action.
        (["0F0,0F1,0B0,0B1", "1F0,1F1,1B0"], (1, None, "1B1"), "missing|never|not"),
        # Does one twice.
        (["0F0,0B0,0B0", "1F0,1B0"], (0, 2, "0B0"), "twice|again|already"),
        # Waits in a circle.
        (
            ["0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"],
            (None, None, None),
            r"(?s)rank 0, index 1: 0B0 waits for 1B0 .*rank 1, index 0: 1F1 waits for 0F1",
        ),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_with_rank_index_and_action(
    orders, place, sentence
) -> None:
    def main(world: World) -> None:
        schedule = ec.pipeline.Schedule.from_csv("\n".join(orders))
        with pytest.raises(ScheduleError, match=sentence) as info:
            ec.Pipeline(
                build("plain", 2),
                world.group,
                schedule=schedule,
                microbatches=schedule.num_microbatches,
            )
        assert (info.value.rank, info.value.index, info.value.action) == place

    ec.run(main, 2)


def test_a_schedule_for_another_size_and_a_model_of_few_blocks_are_refused() -> None:
    def main(world: World) -> None:
        schedule = ec.pipeline.schedule("1f1b", 2, 3, 2)
        with pytest.raises(ArgumentError, match="3 microbatches; the pipeline has 2, 2 and 4"):
            ec.Pipeline(build("plain", 2), world.group, microbatches=4, schedule=schedule)
        with pytest.raises(
            ArgumentError, match=r"2 layers .* fewer than the 3 stages: use at most"
        ):
            ec.pipeline.split(nn.Sequential(*build("plain", 2)), 3)

    ec.run(main, 2)


@pytest.mark.parametrize(
    "weights", [3, "ab", ["a", "b"], [1.0], [1.0, -1.0], [0, 0], [float("nan"), 1.0], [None, 1.0]]
)
def test_weights_that_are_none_are_refused_on_every_rank(weights: Any) -> None:
    def main(world: World) -> None:
        pipe = ec.Pipeline(build("plain", 2), world.group, microbatches=2, loss_fn=mse)
        x, y = batch(8)
        given = {"weights": weights} if pipe.has_loss else {}
        with pytest.raises(ArgumentError, match=r"weights are .*one number >= 0 for each of the 2"):
            pipe.step(x, target=y, **given)
        pipe.step(x, target=y)

    ec.run(main, 2)


def test_a_stage_on_another_device_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"stage 3 has 'weight' on cpu.*computes on cuda:0"):
        check_devices({3: nn.Linear(2, 2)}, torch.device("cuda", 0))
    check_devices({3: nn.Linear(2, 2), 4: nn.Linear(2, 2, device="meta")}, torch.device("cpu"))
    with pytest.raises(ArgumentError, match="stage 3 has 'weight', which has no shape yet"):
        check_devices({3: nn.LazyLinear(2)}, torch.device("cpu"))


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


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"schedule": None}, "schedule is None; give a name such as '1f1b', or a Schedule"),
        ({"stages": None}, "stages is None; give a list of modules"),
        ({"stages": iter(())}, "stages is <.*; give a list of modules"),
    ],
)
def test_stages_and_schedules_of_another_kind_are_refused(wrong, sentence) -> None:
    def main(world: World) -> None:
        given = {"stages": build("plain", 2), "microbatches": 2, **wrong}
        with pytest.raises(ArgumentError, match=sentence):
            ec.Pipeline(group=world.group, **given)

    ec.run(main, 2)


LINE = ec.pipeline.schedule("1f1b", 2, 4, 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ec.pipeline.check("1f1b"), "schedule is '1f1b'; give a Schedule"),
        (lambda: ec.pipeline.simulate(None), "schedule is None; give a Schedule"),
        (lambda: ec.pipeline.lower([]), r"schedule is \[\]; give a Schedule"),
        (
            lambda: ec.pipeline.split(nn.Sequential(nn.Linear(1, 1)), 1, schedule="1f1b"),
            "schedule is '1f1b'; give a Schedule",
        ),
        (lambda: ec.pipeline.simulate(LINE, 3), "costs is 3; give numbers by name"),
        (lambda: ec.pipeline.choose(2, 4, chunks=0), "chunks is 0; give numbers of stages"),
        (lambda: ec.pipeline.choose(2, 4, chunks=["x"]), r"chunks is \['x'\]; give numbers"),
        (lambda: ec.pipeline.choose(2, 4, memory_cap=-1), "memory_cap is -1"),
        (lambda: ec.pipeline.Schedule.from_csv(3), "text is 3; give the CSV itself"),
    ],
)
def test_what_is_no_schedule_cost_or_number_is_said_so(call: Any, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        call()


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
