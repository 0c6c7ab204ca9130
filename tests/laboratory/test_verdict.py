from typing import Any

import pytest
from torch import nn
from torch.nn.functional import mse_loss

import echelon as ec
from tests.laboratory.mutants import forgotten_parameter
from tests.laboratory.tasks import mlp, rows_of_numbers, sgd


def test_parameters_that_no_rank_trains_have_a_note() -> None:
    result = ec.compare(
        mlp, rows_of_numbers(), forgotten_parameter, loss_fn=mse_loss, optimizer=sgd
    )
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
