"""A plan says which rows a rank reads."""

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.errors import ArgumentError
from tests.reference import assert_states_close, mse


@pytest.mark.parametrize("text", ["pp=2,dp=2", "pp=2,shard=2", "dp=2,shard=2", "dp=3", "shard=2"])
def test_a_model_trained_on_the_rows_of_a_plan_is_that_of_one_process(text: str) -> None:
    microbatches = 2 if "pp" in text else None
    plan = ec.Plan.parse(text, microbatches=microbatches)
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).double()

    def main(world: ec.World) -> dict[str, torch.Tensor]:
        assert plan.data_size == plan.dp * plan.shard
        rows = slice(plan.data_rank(world), None, plan.data_size)
        model: nn.Module
        if plan.pp > 1:
            model = ec.parallelize([*build()], plan, world, loss_fn=mse)
            model.step(x[rows], target=y[rows])
        else:
            model = ec.parallelize(build(), plan, world)
            mse(model(x[rows]), y[rows]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return (
            model.whole_state_dict() if hasattr(model, "whole_state_dict") else model.state_dict()
        )

    alone = build()
    mse(alone(x), y).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for found in ec.run(main, plan.num_ranks):
        assert_states_close(found, alone.state_dict(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("text", ["pp=2", "pp=2,dp=2", "pp=2,shard=2", "shard=2"])
def test_groups_by_dim_and_accumulated_steps_of_a_plan_are_those_of_one_process(text: str) -> None:
    axes = ec.Plan.parse(text, microbatches=2 if "pp" in text else None)
    fsdp = {"fsdp": {"min_num_params": 0}} if axes.shard > 1 else {}
    plan = ec.Plan(pp=axes.pp, dp=axes.dp, shard=axes.shard, microbatches=axes.microbatches, **fsdp)
    batches = torch.randn(2, 8, 4, dtype=torch.float64)

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()

    def by_dim(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [param for param in model.parameters() if param.dim() >= 2]
        vectors = [param for param in model.parameters() if param.dim() < 2]
        assert matrices
        assert vectors
        decays = {"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}
        return torch.optim.SGD(decays, lr=0.1)

    def half(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse(output, target) / 2

    def main(world: ec.World) -> dict[str, torch.Tensor]:
        model = ec.parallelize(build(), plan, world, loss_fn=half)
        optimizer = by_dim(model)
        for i, batch in enumerate(batches):
            rows = batch[plan.data_rank(world) :: plan.data_size]
            if isinstance(model, ec.Pipeline):
                model.step(rows, target=rows, finalize=i == 1)
            else:
                half(model(rows), rows).backward()
        optimizer.step()
        state = model.whole_state_dict() if plan.pp > 1 else model.state_dict()
        return {name: value.clone() for name, value in state.items()}

    alone = build()
    optimizer = by_dim(alone)
    mse(alone(batches.flatten(0, 1)), batches.flatten(0, 1)).backward()
    optimizer.step()
    for found in ec.run(main, plan.num_ranks):
        assert_states_close(found, alone.state_dict(), rtol=1e-11, atol=1e-13)


def test_a_plan_for_another_world_has_no_rows() -> None:
    with pytest.raises(ArgumentError, match="2 ranks, and there are 3"):
        ec.run(ec.Plan(dp=2).data_rank, 3)


def _stages_with_a_frozen_one(seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    frozen = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, affine=False, momentum=0))
    return [nn.Linear(4, 5), frozen.requires_grad_(False), nn.Linear(5, 2)]


@pytest.mark.parametrize("text", ["pp=3,dp=2", "pp=3,shard=2"])
def test_a_stage_with_nothing_to_train_has_the_values_and_buffers_of_the_first_rank(
    text: str,
) -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 2)

    def main(world: ec.World) -> dict[str, torch.Tensor]:
        plan = ec.Plan.parse(text, microbatches=2)
        stages = _stages_with_a_frozen_one(seed=world.rank)
        model = ec.parallelize(stages, plan, world, loss_fn=mse)
        rows = slice(plan.data_rank(world), None, plan.data_size)
        for _ in range(2):
            for buffer in model.buffers() if plan.dp > 1 else ():
                buffer += world.rank
            model.step(x[rows], target=y[rows])
        return model.whole_state_dict()

    first, *others = ec.run(main, 6)
    for other in others:
        assert_states_close(other, first, rtol=0, atol=0)


@pytest.mark.parametrize("text", ["pp=3,dp=2", "pp=3,shard=2"])
def test_a_stage_that_had_nothing_to_train_is_not_trained_by_each_replica_alone(text: str) -> None:
    def main(world: ec.World) -> None:
        plan = ec.Plan.parse(text, microbatches=2)
        stages = _stages_with_a_frozen_one(seed=0)
        model = ec.parallelize(stages, plan, world, loss_fn=mse)
        model.step(torch.randn(4, 4), target=torch.randn(4, 2))
        for param in model.parameters():
            param.requires_grad_()
        model.step(torch.randn(4, 4), target=torch.randn(4, 2))

    with pytest.raises(ec.StageError, match=r"'0\.weight' was frozen, and unfrozen after"):
        ec.run(main, 6)
