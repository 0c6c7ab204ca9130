from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.laboratory.rank_training import (
    PlanTraining,
    check_sizes,
    data_rows,
    microbatch_rows,
)
from tests.laboratory.tasks import mlp, rows_of_numbers, sgd


def test_the_rows_of_all_data_ranks_are_the_batch_each_once() -> None:
    plan = ec.Plan(dp=2, shard=2)
    rows = [row for rank in range(4) for row in data_rows(plan, rank, 8)]
    assert rows == list(range(8))


def test_ranks_of_one_pipeline_have_the_same_microbatches() -> None:
    plan = ec.Plan(pp=2, dp=2, microbatches=2)
    of_ranks = [microbatch_rows(plan, rank, 1, 8) for rank in range(4)]
    assert of_ranks[0] == of_ranks[2] == [[(1, 0), (1, 1)], [(1, 2), (1, 3)]]
    assert of_ranks[1] == of_ranks[3] == [[(1, 4), (1, 5)], [(1, 6), (1, 7)]]


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (ec.Plan(dp=3), "batch 0 has 8 rows, which 3 data-parallel ranks"),
        (ec.Plan(pp=2, microbatches=9), "microbatches is 9"),
    ],
)
def test_batches_that_a_plan_cannot_share_are_refused(plan: ec.Plan, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        check_sizes(plan, rows_of_numbers())


def test_a_plan_trains_its_ranks_to_equal_weights() -> None:
    def main(world: World) -> Any:
        torch.manual_seed(0)
        training = PlanTraining(plan=ec.Plan(dp=2), loss_fn=mse_loss, units=None, clip=0.1)
        wrapped = training(world, mlp(), rows_of_numbers(), sgd)
        return [param.detach().clone() for param in wrapped.parameters()]

    first, second = ec.run(main, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
