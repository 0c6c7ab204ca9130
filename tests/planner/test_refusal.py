"""A plan that does not fit is named with the rank, the moment and the bytes."""

import pytest

from echelon.planner.layout import Layout, ShardedStates
from echelon.planner.refusal import RefusedPlan, peak_moment
from echelon.planner.step_memory import step_memory
from tests.planner.sizes import MODEL, STACK


def refused(layout: Layout) -> RefusedPlan:
    return RefusedPlan(layout=layout, memory=step_memory(MODEL, layout, STACK), limit=2**30)


def test_the_rank_is_the_first_of_the_fullest_stage() -> None:
    plan = refused(Layout(pp=4, shard=2, microbatches=8, sharded=ShardedStates.OPTIMIZER))
    assert plan.rank == 2 * plan.memory.rank_stage
    assert f"rank {plan.rank} would have" in str(plan)


def test_the_bytes_are_those_of_the_rank_and_the_largest_are_named() -> None:
    plan = refused(Layout())
    assert plan.nbytes == sum(plan.memory.categories().values())
    sizes = [float(text.split()[-1]) for text in plan.largest().split(", ")]
    assert sizes == sorted(sizes, reverse=True)
    assert f"{plan.nbytes / 2**30:.2f} GiB" in str(plan)
    assert "of 1.00 GiB" in str(plan)


@pytest.mark.parametrize(
    ("layout", "stage", "moment"),
    [
        # Stage i of 1F1B keeps p - i microbatches; with gradients from the next forward on.
        (Layout(pp=4, microbatches=8), 0, "after forward 5 of 8"),
        (Layout(pp=4, microbatches=8), 3, "after forward 2 of 8"),
        (Layout(pp=4, microbatches=4), 0, "in backward 1 of 4"),
        (Layout(microbatches=4), 0, "after forward 2 of 4"),
        (Layout(pp=2, chunks=2, microbatches=4, schedule="v-half"), 0, "after forward 5 of 8"),
        (Layout(pp=2, chunks=2, microbatches=4, schedule="dualpipe-v"), 0, "after forward 6 of 8"),
        # 0F0 ... 0F6 7F0 7I0 7W0 7F1 ...: more than the first rounds of its microbatches
        (
            Layout(pp=4, chunks=2, microbatches=16, schedule="dualpipe-v"),
            0,
            "after forward 12 of 32",
        ),
        # 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2: four are kept, with gradients from 2W0 on
        (Layout(pp=2, chunks=2, microbatches=4, schedule="v-min"), 1, "after forward 6 of 8"),
        # 0F0 0F1 3F0 3I0 3W0 0I0 0W0 3F1: the first rank has three before it has gradients, only
        (Layout(pp=2, chunks=2, microbatches=4, schedule="v-min"), 0, "after forward 3 of 8"),
    ],
)
def test_the_moment_is_the_first_with_all_activations_and_gradients(
    layout: Layout, stage: int, moment: str
) -> None:
    assert peak_moment(layout, stage) == moment
