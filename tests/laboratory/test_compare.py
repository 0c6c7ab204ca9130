from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, UnsupportedError
from tests.laboratory.mutants import Mutant, correct, summed
from tests.laboratory.tasks import (
    Optimizer,
    Rounding,
    adamw,
    mlp,
    mlp_with_batch_norm,
    mlp_with_dropout,
    rows_of_numbers,
    sgd,
)

SHARDED: dict[str, Any] = {"fsdp": {"min_num_params": 0}}
PIPED: dict[str, Any] = {"microbatches": 2}
PLANS = {
    "dp=1": {},
    "dp=4": {},
    "shard=2": SHARDED,
    "shard=4": {**SHARDED, "strategy": ec.Strategy.SHARD_GRAD_OP},
    "dp=2,shard=2": SHARDED,
    "pp=2": PIPED,
    "pp=2,dp=2": {**PIPED, "schedule": "zb-h1"},
    "pp=2,shard=2": {**PIPED, **SHARDED},
}


def plan_of(name: str) -> ec.Plan:
    return ec.Plan.parse(name, **PLANS[name])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_computes_what_one_process_computes(name: str, optimizer: Optimizer) -> None:
    result = ec.compare(
        mlp, rows_of_numbers(), plan_of(name), loss_fn=mse_loss, optimizer=optimizer, clip=0.5
    )
    assert result.same, str(result)
    assert result.notes == ()
    num_tensors = 4 * 3  # each gradient in each step, on one rank at least
    assert result.compared[ec.ValueKind.GRADIENT] >= num_tensors
    assert result.compared[ec.ValueKind.OUTPUT] >= num_tensors
    assert result.compared[ec.ValueKind.STATE] >= num_tensors
    assert max(result.largest.values()) < 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_loop_without_a_mistake_is_the_same(ranks: int) -> None:
    result = Mutant(correct, ec.CauseKind.SUMMED, "", "", batches=lambda: rows_of_numbers(12))
    assert result.compare(ranks=ranks).same


@pytest.mark.parametrize("name", ["dp=4", "shard=2", "dp=2,shard=2"])
def test_dropout_is_the_same_where_each_rank_draws_from_a_stream_of_its_own(name: str) -> None:
    result = ec.compare(
        mlp_with_dropout, rows_of_numbers(), plan_of(name), loss_fn=mse_loss, optimizer=sgd
    )
    assert result.same, str(result)


def test_dropout_of_a_function_is_the_same_where_it_seeds_by_rank() -> None:
    assert Mutant(correct, ec.CauseKind.SUMMED, "", "", model=mlp_with_dropout).compare().same


def test_dropout_in_a_pipeline_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="compare with a dropout of 0"):
        ec.compare(
            mlp_with_dropout, rows_of_numbers(), plan_of("pp=2"), loss_fn=mse_loss, optimizer=sgd
        )


def test_a_plan_with_batch_norm_is_not_the_same() -> None:
    result = ec.compare(
        mlp_with_batch_norm, rows_of_numbers(), plan_of("dp=4"), loss_fn=mse_loss, optimizer=sgd
    )
    assert result.first is not None
    assert (result.first.kind, result.first.name) == (ec.ValueKind.OUTPUT, "1")
    assert result.causes[0].kind is ec.CauseKind.BATCH_NORM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_model_that_rounds_inside_gives_no_alarm(num_ranks: int, dtype: torch.dtype) -> None:
    """Gradients of 3 ranks are scaled by no power of 2, so they round to other numbers."""
    result = ec.compare(
        lambda: Rounding(dtype),
        rows_of_numbers(12),
        ec.Plan(dp=num_ranks),
        loss_fn=mse_loss,
        optimizer=sgd,
    )
    assert result.same, str(result)


def test_a_plan_that_shards_nothing_has_a_note() -> None:
    result = ec.compare(
        mlp, rows_of_numbers(), ec.Plan(shard=2), loss_fn=mse_loss, optimizer=sgd, steps=1
    )
    assert result.same
    assert "sharded no parameter" in result.notes[0]


@pytest.mark.slow
def test_local_processes_are_compared_like_simulated_ranks() -> None:
    result = Mutant(summed, ec.CauseKind.SUMMED, "2.bias", "").compare(world="processes", ranks=2)
    assert [cause.kind for cause in result.causes] == [ec.CauseKind.SUMMED]
    good = ec.compare(
        mlp,
        rows_of_numbers(),
        plan_of("shard=2"),
        loss_fn=mse_loss,
        optimizer=sgd,
        world="processes",
    )
    assert good.same, str(good)


# What is refused ---------------------------------------------------------------------------------


def other_model(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    correct(world, mlp().double(), batches, optimizer)


def without_steps(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    """Forgets to train."""


def fails_on_rank_1(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    if world.rank == 1:
        raise KeyError("boom")
    correct(world, model, batches, optimizer)


def one_model() -> Callable[[], nn.Module]:
    model = mlp()
    return lambda: model


def unseeded_models() -> Callable[[], nn.Module]:
    generator = torch.Generator()

    def make() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(generator=generator)
        return model

    return make


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"make_model": one_model()}, "returned the same module"),
    ({"make_model": unseeded_models()}, "differ in '0.weight'"),
    ({"make_model": None}, "make_model is None"),
    ({"make_model": lambda: 3}, "make_model returned 3"),
    ({"optimizer": lambda parameters: None}, "optimizer returned None"),
    ({"plan_or_function": lambda world: None}, "the function takes .world., and it is called"),
    ({"loss_fn": 3}, "loss_fn is 3"),
    ({"loss_fn": lambda output, target: output}, "loss_fn returned a tensor of shape"),
    ({"loss_fn": lambda output, target: output.sum().item()}, "loss_fn returned"),
    ({"loss_fn": lambda output, target: output.detach().sum()}, "does not depend"),
    ({"optimizer": None}, "optimizer is None"),
    ({"batches": []}, "batches has 0 of them for 3 steps"),
    ({"batches": torch.ones(3)}, "batches is Tensor"),
    ({"steps": 4}, "batches has 3 of them for 4 steps"),
    ({"steps": 0}, "steps is 0"),
    ({"ranks": 0}, "ranks is 0"),
    ({"world": "cluster"}, "world is 'cluster'"),
    ({"clip": -1}, "clip is -1"),
    ({"plan_or_function": "dp=2"}, "plan_or_function is 'dp=2'"),
    ({"plan_or_function": ec.Plan(dp=2), "ranks": 3}, "ranks is 3, and the plan dp=2 is for 2"),
    ({"plan_or_function": ec.Plan(dp=3)}, "batch 0 has 8 rows"),
    ({"units": lambda name, module: False}, "units are for a plan"),
    ({"plan_or_function": other_model}, "trained other parameters"),
    ({"plan_or_function": without_steps}, "made 0 steps"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED, ids=[case[1] for case in REFUSED])
def test_what_cannot_be_compared_is_refused_with_a_sentence(
    arguments: dict[str, Any], sentence: str
) -> None:
    good: dict[str, Any] = {
        "make_model": mlp,
        "batches": rows_of_numbers(),
        "plan_or_function": correct,
        "loss_fn": mse_loss,
        "optimizer": sgd,
    }
    with pytest.raises(ArgumentError, match=sentence):
        ec.compare(**{**good, **arguments})


def test_an_error_of_the_function_names_its_rank() -> None:
    with pytest.raises(KeyError, match="boom") as caught:
        Mutant(fails_on_rank_1, ec.CauseKind.SUMMED, "", "").compare(ranks=2)
    assert "raised on rank 1 of 2" in "".join(caught.value.__notes__)


def test_batches_as_dicts_call_the_model_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            output = self.linear(x)
            return {"loss": mse_loss(output, y), "output": output}

    batches = [{"x": x, "y": y} for x, y in rows_of_numbers()]
    result = ec.compare(
        Named,
        batches,
        ec.Plan(dp=2),
        loss_fn=lambda output, batch: output["loss"],
        optimizer=sgd,
    )
    assert result.same, str(result)
    assert result.compared[ec.ValueKind.OUTPUT] == 2 * 2 * 3  # ranks, tensors by rows, and steps
