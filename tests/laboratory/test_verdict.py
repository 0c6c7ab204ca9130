from typing import Any

import pytest
from torch import nn
from torch.nn.functional import mse_loss

import echelon as ec
from echelon.comm.world import World
from tests.laboratory.mutants import average, my_rows
from tests.laboratory.tasks import Optimizer, mlp, rows_of_numbers, sgd


def with_frozen_head(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    stepper = optimizer(list(model.parameters())[:2])
    for x, y in batches:
        mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
        average(world, model)
        stepper.step()
        model.zero_grad()


def test_parameters_that_no_rank_trains_have_a_note() -> None:
    result = ec.compare(mlp, rows_of_numbers(), with_frozen_head, loss_fn=mse_loss, optimizer=sgd)
    assert "no rank trained these parameters: 2.weight, 2.bias" in result.notes


class Summary(nn.Module):
    """Its one inner output is of the whole batch and not of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.mean = nn.Identity()

    def forward(self, x: Any) -> Any:
        output = self.inner(x)
        self.mean(output.mean())
        return output


def test_outputs_without_rows_have_a_note_and_give_no_alarm() -> None:
    result = ec.compare(Summary, rows_of_numbers(), ec.Plan(dp=2), loss_fn=mse_loss, optimizer=sgd)
    assert result.same, str(result)
    assert result.notes == ("outputs without rows that could be compared: mean",)


@pytest.mark.parametrize("name", ["pp=2", "pp=2,shard=2"])
def test_a_module_that_a_stage_runs_only_in_part_is_not_compared(name: str) -> None:
    sharded = {"fsdp": {"min_num_params": 0}} if "shard" in name else {}
    plan = ec.Plan.parse(name, microbatches=2, **sharded)
    result = ec.compare(mlp, rows_of_numbers(), plan, loss_fn=mse_loss, optimizer=sgd)
    assert result.same, str(result)
    assert result.notes == ()
