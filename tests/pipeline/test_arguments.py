"""Arguments of which no pipeline can be made are refused on every rank."""

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, ModelMismatch, ScheduleError, UnsupportedError
from echelon.pipeline.arguments import check_devices
from tests.pipeline.models import build, each, pipeline
from tests.worlds import run_world


def wrong_arguments_are_refused(world: World) -> None:
    stages = build("plain", world.size)
    for options, error, words in (
        ({"microbatches": 0}, ArgumentError, "^microbatches is 0; give a whole number >= 1"),
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


def sizes_that_make_no_pipeline_are_refused(world: World) -> None:
    stages = build("plain", 2)
    alone = world.group.subgroup([0])
    if alone is not None:
        with pytest.raises(ArgumentError, match=r"^world size must be >= 2: .*Start 2 ranks"):
            ec.Pipeline(stages, alone, microbatches=2, schedule="1f1b")


@pytest.mark.parametrize(("kind", "ranks"), [("threads", 2), ("gloo", 2)])
def test_what_makes_no_pipeline_is_refused_on_every_rank(kind: str, ranks: int) -> None:
    checks = (wrong_arguments_are_refused, sizes_that_make_no_pipeline_are_refused)
    run_world(kind, each, ranks, (checks,))


def test_ranks_with_other_schedules_are_told() -> None:
    def main(world: World) -> None:
        with pytest.raises(ModelMismatch, match="schedule"):
            pipeline(world, build("plain", 2), schedule=["gpipe", "1f1b"][world.rank])

    ec.run(main, 2)


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


def test_a_stage_on_another_device_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"stage 3 has 'weight' on cpu.*computes on cuda:0"):
        check_devices({3: nn.Linear(2, 2)}, torch.device("cuda", 0))
    check_devices({3: nn.Linear(2, 2), 4: nn.Linear(2, 2, device="meta")}, torch.device("cpu"))
    with pytest.raises(ArgumentError, match="stage 3 has 'weight', which has no shape yet"):
        check_devices({3: nn.LazyLinear(2)}, torch.device("cpu"))


def test_gradients_that_count_the_rows_of_a_batch_are_refused_where_it_is_cut() -> None:
    def main(world: World) -> None:
        counting = nn.Sequential(nn.Embedding(5, 2, scale_grad_by_freq=True))
        stages = [counting, *build("plain", 2)[1:]]
        pipeline(world, stages, microbatches=1)
        with pytest.raises(UnsupportedError, match=r"^module '0' .* a row is in one microbatch"):
            pipeline(world, stages, microbatches=2)

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
