"""Training loops with one mistake each, as users of distributed training make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import echelon as ec
from echelon.comm.world import World
from echelon.laboratory.comparison import CauseKind
from tests.laboratory.tasks import (
    Averaging,
    Optimizer,
    adamw,
    mlp,
    mlp_with_batch_norm,
    mlp_with_dropout,
    rows_of_numbers,
    rows_of_tokens,
    sgd,
    sixteen_rows,
    ten_rows,
    token_loss,
    token_model,
)

RANKS = 4


def average(world: World, model: nn.Module) -> None:
    """Replace each gradient by its mean over ranks."""
    for param in model.parameters():
        assert param.grad is not None
        world.group.all_reduce(param.grad, "mean")


def my_rows(world: World, value: Tensor) -> Tensor:
    return value[world.rank :: world.size]


# The loop without a mistake ----------------------------------------------------------------------


def correct(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    torch.manual_seed(world.rank + 7)
    _plain_loop(world, model, batches, optimizer)


# Loops with one mistake --------------------------------------------------------------------------


def mean_over_unequal_batches(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    _plain_loop(world, model, batches, optimizer)  # 10 rows on 4 ranks: two have 3, two have 2


def mean_over_unequal_tokens(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> nn.Module:
    wrapped = ec.DDP(model, world.group)
    stepper = optimizer(wrapped.parameters())
    for x, y in batches:
        token_loss(wrapped(my_rows(world, x)), my_rows(world, y)).backward()
        stepper.step()
        stepper.zero_grad()
    return wrapped


def summed(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> nn.Module:
    wrapped = ec.DDP(model, world.group, reduction="sum")
    stepper = optimizer(wrapped.parameters())
    for x, y in batches:
        mse_loss(wrapped(my_rows(world, x)), my_rows(world, y)).backward()
        stepper.step()
        stepper.zero_grad()
    return wrapped


def averaged_twice(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> nn.Module:
    wrapped = ec.FSDP(model, world.group, min_num_params=0)
    stepper = optimizer(wrapped.parameters())
    for x, y in batches:
        loss = mse_loss(wrapped(my_rows(world, x)), my_rows(world, y))
        (loss / world.size).backward()
        stepper.step()
        stepper.zero_grad()
    return wrapped


def head_outside_of_the_wrapper(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    assert isinstance(model, nn.Sequential)
    body = ec.DDP(model[:2], world.group)
    stepper = optimizer(model.parameters())
    for x, y in batches:
        mse_loss(model[2](body(my_rows(world, x))), my_rows(world, y)).backward()
        stepper.step()
        stepper.zero_grad()


def clipped_on_one_rank(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> nn.Module:
    wrapped = ec.DDP(model, world.group)  # which would refuse it before the end, and name no cause
    stepper = optimizer(wrapped.parameters())
    for x, y in batches:
        mse_loss(wrapped(my_rows(world, x)), my_rows(world, y)).backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.05 if world.rank == 1 else 1e9)
        stepper.step()
        stepper.zero_grad()
    return wrapped


def without_zero_grad(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> nn.Module:
    model = ec.FSDP(model, world.group, min_num_params=0)
    stepper = optimizer(model.parameters())
    for x, y in batches:
        mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
        stepper.step()
    return model


def padded_sampler(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    """As ``DistributedSampler`` does: the first rows fill up the last ranks."""
    stepper = optimizer(model.parameters())
    for x, y in batches:  # 10 rows on 4 ranks
        rows = torch.arange(12).remainder(10)[world.rank :: world.size]
        mse_loss(model(x[rows]), y[rows]).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def dropped_tail(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    stepper = optimizer(model.parameters())
    for x, y in batches:  # 10 rows on 4 ranks
        rows = torch.arange(8)[world.rank :: world.size]
        mse_loss(model(x[rows]), y[rows]).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def without_a_sampler(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    """Each rank shuffles by its own seed and takes the first rows."""
    stepper = optimizer(model.parameters())
    generator = torch.Generator().manual_seed(world.rank)
    for x, y in batches:
        rows = torch.randperm(len(x), generator=generator)[: len(x) // world.size]
        mse_loss(model(x[rows]), y[rows]).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def seeded_alike(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    torch.manual_seed(42)
    _plain_loop(world, model, batches, optimizer)


def seeded_by_nobody(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    _plain_loop(world, model, batches, optimizer)


def _plain_loop(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    stepper = optimizer(model.parameters())
    for x, y in batches:
        mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def clipped_by_shards(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> nn.Module:
    wrapped = ec.FSDP(model, world.group, min_num_params=0)
    stepper = optimizer(wrapped.parameters())
    for x, y in batches:
        mse_loss(wrapped(my_rows(world, x)), my_rows(world, y)).backward()
        grads = [param.grad for param in wrapped.parameters() if param.grad is not None]
        norm = (
            sum(
                value * value
                for grad in grads
                for value in ec.local_shard(grad).reshape(-1).tolist()
            )
            ** 0.5
        )
        for grad in grads:
            grad.mul_(min(1.0, 0.05 / (norm + 1e-6)))
        stepper.step()
        stepper.zero_grad()
    return wrapped


def clipped_before_the_mean(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    stepper = optimizer(model.parameters())
    for x, y in batches:
        mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def stale_buffer(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    """Rank 0 alone updates a buffer, and nobody sends it."""
    assert isinstance(model, Averaging)
    stepper = optimizer(model.parameters())
    model.train(world.rank == 0)
    model.count += world.rank != 0
    for x, y in batches:
        mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def compressed_gradients(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    stepper = optimizer(model.parameters())
    for x, y in batches:
        mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
        for param in model.parameters():
            assert param.grad is not None
            small = param.grad.bfloat16()
            world.group.all_reduce(small, "mean")
            param.grad.copy_(small)
        stepper.step()
        stepper.zero_grad()


def autocast(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    stepper = optimizer(model.parameters())
    for x, y in batches:
        with torch.autocast("cpu", torch.bfloat16):
            output = model.float()(my_rows(world, x).float())
        mse_loss(output.double(), my_rows(world, y)).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def accumulated_without_a_division(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    _accumulate(world, model, batches, optimizer, divisor=1)


def accumulated_with_two_divisions(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    _accumulate(world, model, batches, optimizer, divisor=4)


def _accumulate(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer, *, divisor: int
) -> None:
    stepper = optimizer(model.parameters())
    for x, y in batches:
        parts = zip(my_rows(world, x).chunk(2), my_rows(world, y).chunk(2), strict=True)
        for inputs, target in parts:
            (mse_loss(model(inputs), target) / divisor).backward()
        average(world, model)
        stepper.step()
        stepper.zero_grad()


def forgotten_parameter(
    world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    """The optimizer gets only some of the parameters."""
    stepper = optimizer(list(model.parameters())[:2])
    for x, y in batches:
        mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
        average(world, model)
        stepper.step()
        model.zero_grad()


def other_start(world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer) -> None:
    torch.manual_seed(world.rank)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    _plain_loop(world, model, batches, optimizer)


@dataclass(frozen=True)
class Mutant:
    """A loop with a mistake, and what a comparison must say of it."""

    train: Callable[..., Any]
    cause: CauseKind
    where: str  # a tensor or module that must be named
    text: str  # a part of the cause
    model: Callable[[], nn.Module] = mlp
    batches: Callable[[], list[Any]] = rows_of_numbers
    loss: Callable[[Any, Any], Tensor] = mse_loss
    optimizer: Optimizer = sgd
    options: Mapping[str, Any] = field(default_factory=dict)

    def compare(self, **options: Any) -> ec.Comparison:
        return ec.compare(
            self.model,
            self.batches(),
            self.train,
            loss_fn=self.loss,
            optimizer=self.optimizer,
            **{"ranks": RANKS, **self.options, **options},
        )


MUTANTS = [
    Mutant(
        mean_over_unequal_batches,
        CauseKind.MEAN_OF_MEANS,
        "2.bias",
        "3, 3, 2, 2 rows",
        batches=ten_rows,
    ),
    Mutant(
        mean_over_unequal_tokens,
        CauseKind.MEAN_OF_MEANS,
        "1.bias",
        "tokens",
        model=token_model,
        batches=rows_of_tokens,
        loss=token_loss,
        optimizer=adamw,
    ),
    Mutant(summed, CauseKind.SUMMED, "2.bias", "4 times"),
    Mutant(averaged_twice, CauseKind.AVERAGED_TWICE, "2.bias", "1/4 of"),
    Mutant(head_outside_of_the_wrapper, CauseKind.NOT_REDUCED, "2.bias", "own backward"),
    Mutant(
        padded_sampler,
        CauseKind.SAMPLES,
        "2.bias",
        "0 (ranks 0, 2), 1 (ranks 1, 3)",
        batches=ten_rows,
    ),
    Mutant(
        dropped_tail,
        CauseKind.SAMPLES,
        "2.bias",
        "rows 8, 9 were seen by no rank",
        batches=ten_rows,
    ),
    Mutant(without_a_sampler, CauseKind.SAMPLES, "2.bias", "seen by no rank"),
    Mutant(
        seeded_alike,
        CauseKind.RANDOM_STREAM,
        "random stream",
        "seeded alike",
        model=mlp_with_dropout,
    ),
    Mutant(
        seeded_by_nobody,
        CauseKind.RANDOM_STREAM,
        "random stream",
        "nobody seeded",
        model=mlp_with_dropout,
    ),
    Mutant(correct, CauseKind.BATCH_NORM, "1", "BatchNorm1d", model=mlp_with_batch_norm),
    *(
        Mutant(train, CauseKind.CLIPPING, "2.bias", "0.05", options={"clip": 0.05})
        for train in (clipped_by_shards, clipped_before_the_mean)
    ),
    Mutant(clipped_before_the_mean, CauseKind.CLIPPING, "2.bias", "0.05"),
    Mutant(clipped_on_one_rank, CauseKind.CLIPPED_BY_SOME, "2.bias", "norm 0.05"),
    Mutant(without_zero_grad, CauseKind.NOT_ZEROED, "2.bias", "of the step before"),
    Mutant(stale_buffer, CauseKind.STALE, "count", "since step 0", model=Averaging),
    Mutant(compressed_gradients, CauseKind.PRECISION, "2.bias", "bfloat16", optimizer=adamw),
    Mutant(autocast, CauseKind.PRECISION, "0", "bfloat16"),
    *(
        Mutant(train, CauseKind.ACCUMULATION, "2.bias", times, batches=sixteen_rows)
        for train, times in (
            (accumulated_without_a_division, "2 times"),
            (accumulated_with_two_divisions, "1/2 of"),
        )
    ),
    Mutant(forgotten_parameter, CauseKind.STALE, "2.weight", "since the start"),
    Mutant(other_start, CauseKind.START, "0.weight", "other values"),
]
