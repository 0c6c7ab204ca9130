from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from echelon.comm.world import World
from echelon.laboratory.comparison import CauseKind, ValueKind
from tests.laboratory.mutants import MUTANTS, Mutant, average, correct, my_rows
from tests.laboratory.tasks import (
    Optimizer,
    Rounding,
    mlp,
    mlp_with_dropout,
    rows_of_numbers,
    sixteen_rows,
    ten_rows,
)


def noisy(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    stepper = optimizer(model.parameters())
    for x, y in batches:
        mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
        average(world, model)
        for param in model.parameters():
            assert param.grad is not None
            param.grad += torch.arange(param.numel()).view_as(param)
        stepper.step()
        stepper.zero_grad()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.train.__name__)
def test_each_mistake_of_a_training_loop_is_named_with_its_cause_and_its_tensor(
    mutant: Mutant,
) -> None:
    result = mutant.compare()
    assert not result.same
    cause = result.causes[0]
    assert cause.kind is mutant.cause
    assert mutant.text in cause.text
    assert result.first is not None
    assert mutant.where in (result.first.name, *cause.names)


@pytest.mark.parametrize(
    ("name", "size", "ranks"),
    [
        ("summed", 12, 2),
        ("summed", 12, 3),
        ("clipped_before_the_mean", 12, 2),
        ("clipped_before_the_mean", 12, 3),
        ("padded_sampler", 10, 3),
    ],
)
def test_the_cause_does_not_depend_on_the_number_of_ranks(name: str, size: int, ranks: int) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.train.__name__ == name)
    result = replace(mutant, batches=lambda: rows_of_numbers(size)).compare(ranks=ranks)
    assert [cause.kind for cause in result.causes] == [mutant.cause]


def test_a_cause_tells_one_rank_from_several() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.cause is CauseKind.CLIPPED_BY_SOME)
    result = replace(mutant, batches=lambda: rows_of_numbers(12)).compare(ranks=3)
    text = result.causes[0].text
    assert text.startswith("rank 1 clipped to the gradient norm 0.05, and ranks 0, 2 kept the norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["summed", "averaged_twice", "padded_sampler", "accumulated_with_two_divisions"]
)
def test_a_cause_is_named_where_a_model_rounds_inside(name: str, dtype: torch.dtype) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.train.__name__ == name)
    size = {"padded_sampler": 10, "accumulated_with_two_divisions": 24}.get(name, 12)
    rounding = replace(mutant, model=lambda: Rounding(dtype), batches=lambda: rows_of_numbers(size))
    causes = rounding.compare(ranks=4 if name == "padded_sampler" else 3).causes
    assert [cause.kind for cause in causes] == [mutant.cause]


def clipped_rightly(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    stepper = optimizer(model.parameters())
    for x, y in batches:
        mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
        average(world, model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        stepper.step()
        stepper.zero_grad()


@pytest.mark.parametrize("size", [10, 12])  # uneven rows, or not
@pytest.mark.parametrize("ranks_clip", [True, False])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_uneven_rows_and_clipping_on_one_side_are_both_told(
    size: int, ranks_clip: bool, clip: float | None
) -> None:
    kinds = [CauseKind.MEAN_OF_MEANS] if size == 10 else []
    kinds += [CauseKind.CLIPPED_OTHERWISE] if ranks_clip != (clip is not None) else []
    train = clipped_rightly if ranks_clip else correct
    mutant = Mutant(
        train, CauseKind.CLIPPED_OTHERWISE, "", "", batches=lambda: rows_of_numbers(size)
    )
    result = mutant.compare(clip=clip)
    assert [cause.kind for cause in result.causes] == kinds
    assert result.same == (not kinds)


def test_a_loop_with_an_unknown_mistake_differs_without_a_cause() -> None:
    result = Mutant(noisy, MUTANTS[0].cause, "", "").compare()
    assert not result.same
    assert result.causes == ()
    assert "cause unknown" in str(result)


def replicas(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    """Each rank takes the whole batch, as the ranks of tensor parallelism do."""
    torch.manual_seed(9)
    stepper = optimizer(model.parameters())
    for x, y in batches:
        mse_loss(model(x), y).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def summed_replicas(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    stepper = optimizer(model.parameters())
    for x, y in batches:
        mse_loss(model(x), y).backward()
        for param in model.parameters():
            assert param.grad is not None
            world.group.all_reduce(param.grad)
        stepper.step()
        stepper.zero_grad()


@pytest.mark.slow
def test_ranks_with_the_same_rows_are_replicas_which_may_draw_the_same_numbers() -> None:
    assert Mutant(replicas, CauseKind.SUMMED, "", "", model=mlp_with_dropout).compare().same
    [cause] = Mutant(summed_replicas, CauseKind.SUMMED, "", "").compare().causes
    assert cause.kind is CauseKind.SUMMED
    assert "on 4 ranks" in cause.text


def the_same_first_rows(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    stepper = optimizer(model.parameters())
    for x, y in batches:
        mse_loss(model(x[:2]), y[:2]).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def test_ranks_that_all_take_the_same_part_of_a_batch_leave_rows_unseen() -> None:
    [cause] = Mutant(the_same_first_rows, CauseKind.SAMPLES, "", "").compare().causes
    assert cause.kind is CauseKind.SAMPLES
    assert "rows 2, 3, 4, 5, 6, 7 were seen by no rank" in cause.text


def called_by_parts(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    assert isinstance(model, nn.Sequential)
    stepper = optimizer(model.parameters())
    for x, y in batches:
        hidden = model[1](model[0](my_rows(world, x)))
        mse_loss(model[2](hidden), my_rows(world, y)).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def test_a_loop_that_calls_modules_one_by_one_is_compared_like_others() -> None:
    mutant = Mutant(called_by_parts, CauseKind.MEAN_OF_MEANS, "", "")
    assert mutant.compare().same
    [cause] = replace(mutant, batches=ten_rows).compare().causes
    assert cause.kind is CauseKind.MEAN_OF_MEANS
    assert "3, 3, 2, 2 rows" in cause.text


def other_optimizer_on_rank_1(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    stepper = optimizer(model.parameters())
    if world.rank == 1:
        stepper.param_groups[0]["momentum"] = 0.5
    for x, y in batches:
        mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def test_a_state_of_an_optimizer_that_differs_is_named_with_its_rank() -> None:
    result = Mutant(other_optimizer_on_rank_1, CauseKind.STALE, "", "").compare()
    assert result.first is not None
    assert (result.first.step, result.first.kind, result.first.rank, result.first.ranks) == (
        1,
        ValueKind.STATE,
        1,
        (1,),
    )
    assert result.first.name.startswith("momentum_buffer of ")
    assert [cause.kind for cause in result.causes] == [CauseKind.OPTIONS]
    assert "momentum is 0.5 on rank 1 and 0.9 in one process" in result.causes[0].text


@pytest.mark.parametrize(
    ("option", "kind", "text"),
    [
        ("lr", ValueKind.PARAMETER, "in step 0 lr is 0.4 on ranks 0, 1, 2, 3 and 0.1 in one"),
        ("momentum", ValueKind.STATE, "in step 1 momentum is 4 on ranks 0, 1, 2, 3 and 0.9 in one"),
    ],
)
def test_options_of_the_optimizer_that_one_process_does_not_have_are_named(
    option: str, kind: ValueKind, text: str
) -> None:
    def train(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
        stepper = optimizer(model.parameters())
        for group in stepper.param_groups:
            group[option] = {"lr": 0.1 * world.size, "momentum": world.size}[option]
        for x, y in batches:
            mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
            average(world, model)
            stepper.step()
            stepper.zero_grad()

    def with_momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    result = Mutant(train, CauseKind.OPTIONS, "0.weight", text, optimizer=with_momentum).compare()
    assert result.first is not None
    assert result.first.kind is kind
    assert [cause.kind for cause in result.causes] == [CauseKind.OPTIONS]
    assert result.causes[0].text.startswith(text)


@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_forward_that_no_backward_reaches_is_no_part_of_the_step(
    ranks: int, with_graph: bool
) -> None:
    def train(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
        def log(x: Any, y: Any) -> None:
            with torch.set_grad_enabled(with_graph):
                assert mse_loss(model.eval()(x), y).item() > 0
            model.train()

        torch.manual_seed(world.rank)
        stepper = optimizer(model.parameters())
        for x, y in batches:
            log(my_rows(world, x), my_rows(world, y))
            for rows in zip(my_rows(world, x).chunk(2), my_rows(world, y).chunk(2), strict=True):
                mse_loss(model(rows[0]), rows[1]).backward()
            average(world, model)
            stepper.step()
            stepper.zero_grad()

    for make_model in (mlp, mlp_with_dropout):
        mutant = Mutant(train, CauseKind.ACCUMULATION, "", "", make_model, sixteen_rows)
        [cause] = mutant.compare(ranks=ranks).causes
        assert cause.kind is CauseKind.ACCUMULATION
        assert "each rank accumulates 2 of them" in cause.text
