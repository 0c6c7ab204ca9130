"""Loops that train with ``torch.distributed``, over the groups of this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import echelon as ec
from echelon.comm.world import World
from tests.laboratory.mutants import my_rows
from tests.laboratory.tasks import Optimizer, adamw, mlp, rows_of_numbers


@contextmanager
def process_group(store: str, world: World) -> Iterator[None]:
    import echelon.c10d  # noqa: F401 (registers the backend)

    address = f"file://{store}"
    dist.init_process_group("echelon", init_method=address, rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(
    world: World, wrapped: nn.Module, batches: list[Any], optimizer: torch.optim.Optimizer
) -> None:
    for x, y in batches:
        mse_loss(wrapped(my_rows(world, x)), my_rows(world, y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def distributed_data_parallel(
    store: str, world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> nn.Module:
    with process_group(store, world):
        wrapped = nn.parallel.DistributedDataParallel(model)
        train(world, wrapped, batches, optimizer(wrapped.parameters()))
    return wrapped


def summing_hook(
    store: str, world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> nn.Module:
    def hook(state, bucket):  # torch reads annotations, and knows no postponed ones
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    with process_group(store, world):
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(None, hook)
        train(world, wrapped, batches, optimizer(wrapped.parameters()))
    return wrapped


def sharded(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in model.children():
        if isinstance(module, nn.Linear):
            fully_shard(module)
    fully_shard(model)


def fully_sharded(
    store: str, world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    with process_group(store, world):
        sharded(model)
        train(world, model, batches, optimizer(model.parameters()))


def clipped_by_shards(
    store: str, world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    with process_group(store, world):
        sharded(model)
        stepper = optimizer(model.parameters())
        for x, y in batches:
            mse_loss(model(my_rows(world, x)), my_rows(world, y)).backward()
            local = [param.grad.to_local() for param in model.parameters()]  # type: ignore[union-attr]
            norm = torch.cat([gradient.reshape(-1) for gradient in local]).norm()
            for gradient in local:
                gradient.mul_((0.05 / (norm + 1e-6)).clamp(max=1.0))
            stepper.step()
            stepper.zero_grad()


def tensor_parallel(
    store: str, world: World, model: nn.Module, batches: list[Any], optimizer: Optimizer
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    with process_group(store, world):
        mesh = init_device_mesh("cpu", (world.size,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        stepper = optimizer(model.parameters())
        for x, y in batches:
            mse_loss(model(x), y).backward()
            stepper.step()
            stepper.zero_grad()


def compared(train: Callable[..., Any], folder: Path, **options: Any) -> ec.Comparison:
    return ec.compare(
        mlp,
        rows_of_numbers(),
        partial(train, str(folder / "store")),
        loss_fn=mse_loss,
        optimizer=adamw,
        world="processes",
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [distributed_data_parallel, fully_sharded, tensor_parallel],
    ids=lambda train: train.__name__,
)
def test_a_right_loop_of_torch_distributed_is_the_same(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    result = compared(train, tmp_path)
    assert result.same, str(result)
    assert result.compared[ec.ValueKind.STATE] >= 4 * 3


@pytest.mark.slow
def test_a_hook_of_ddp_that_sums_is_named(tmp_path: Path) -> None:
    [cause] = compared(summing_hook, tmp_path).causes
    assert cause.kind is ec.CauseKind.SUMMED


@pytest.mark.slow
def test_shards_of_fully_shard_that_are_clipped_by_themselves_are_named(tmp_path: Path) -> None:
    [cause] = compared(clipped_by_shards, tmp_path, clip=0.05).causes
    assert cause.kind is ec.CauseKind.CLIPPING
