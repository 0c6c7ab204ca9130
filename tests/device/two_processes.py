"""One of two ranks on simulated devices: ``python -m tests.device.two_processes FOLDER NAME``.

Each program gives its losses, on one process of the CPU (``size`` is 1) as on the two.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from echelon.testing.device.collectives import NAME
from echelon.testing.device.simulated import Order, install, simulated_device

ORDERS = ((Order.EAGER, 0), (Order.LAZY, 0), (Order.RANDOM, 1), (Order.RANDOM, 2))
STEPS = 3


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def stack(device: str, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(blocks))).to(device)


def batch(step: int, device: str, size: int) -> tuple[Tensor, Tensor]:
    """The rows of this rank, if ``size`` of them share the batch."""
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
    part = rank() % size
    return x.chunk(size)[part].to(device), y.chunk(size)[part].to(device)


def mean(loss: Tensor, size: int) -> float:
    loss = loss.detach().clone()
    if size > 1:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def train(
    model: nn.Module,
    device: str,
    size: int,
    steps: range = range(STEPS),
    call: Callable[[Tensor], Tensor] | None = None,
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in steps:
        x, y = batch(step, device, size)
        loss = F.mse_loss((call or model)(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss, size))
    return losses


def in_parallel(model: nn.Module, size: int, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options) if size > 1 else model


def sharded(model: nn.Sequential, size: int) -> nn.Sequential:
    for each in (*model, model) if size > 1 else ():
        fully_shard(each)
    return model


# Programs ----------------------------------------------------------------------------------------


def ddp(device: str, size: int) -> list[float]:
    options: dict[str, Any] = {"device_ids": [rank()], "bucket_cap_mb": 0.001}
    return train(in_parallel(stack(device), size, **options), device, size)


def fsdp2(device: str, size: int) -> list[float]:
    return train(sharded(stack(device), size), device, size)


def tensor_parallel(device: str, size: int) -> list[float]:
    model = stack(device)
    for each in model if size > 1 else ():
        mesh = init_device_mesh(device, (size,))
        parallelize_module(each, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, device, 1)


def pipeline(device: str, size: int) -> list[float]:
    if size == 1:
        return train(stack(device), device, 1)
    own, last, losses = stack(device)[rank()], rank() == size - 1, []
    stage = PipelineStage(own, rank(), size, torch.device(device))
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(step, device, 1)
        schedule, parts = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss), list[Tensor]()
        if last:
            schedule.step(target=y, losses=parts)
        else:
            schedule.step(x)
        loss = torch.stack(parts).mean().detach() if last else torch.zeros((), device=device)
        dist.broadcast(loss, size - 1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def amp(dtype: torch.dtype) -> Callable[[str, int], list[float]]:
    def scaled(device: str, size: int) -> list[float]:
        model = in_parallel(stack(device), size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler, losses = torch.amp.GradScaler(device, init_scale=2.0**24), list[float]()
        for step in range(STEPS + 3):
            x, y = batch(step, device, size)
            with torch.autocast(device, dtype):
                loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(mean(loss, size))
        return [*losses, scaler.get_scale()]

    return scaled


def checkpointed(*, use_reentrant: bool) -> Callable[[str, int], list[float]]:
    def run(device: str, size: int) -> list[float]:
        model = stack(device)
        for each in model if size > 1 else ():
            fully_shard(each)

        def call(x: Tensor) -> Tensor:
            x.requires_grad_()  # a reentrant one needs it
            for each in model:
                x = checkpoint(each, x, use_reentrant=use_reentrant)
            return x

        return train(model, device, size, call=call)

    return run


def saved(device: str, size: int) -> list[float]:
    """The second half is trained by a model that was loaded."""
    model = sharded(stack(device), size)
    losses = train(model, device, size)
    if size > 1:
        path = f"{sys.argv[1]}/saved"
        save({"model": model.state_dict()}, checkpoint_id=path)
        torch.manual_seed(9)
        model = sharded(nn.Sequential(block(), block()).to(device), size)
        state = {"model": model.state_dict()}
        load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
    return losses + train(model, device, size, range(STEPS, 2 * STEPS))


def of_a_subclass(device: str, size: int) -> list[float]:
    """A collective of two tensors that are one."""
    if size == 1:
        return [3.0, 30.0]
    values = TwoTensor(*(torch.tensor([n * (rank() + 1.0)], device=device) for n in (1, 10)))
    dist.all_reduce(values)
    return [values.a.item(), values.b.item()]


PROGRAMS: dict[str, Callable[[str, int], list[float]]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "tensor parallel": tensor_parallel,
    "1F1B": pipeline,
    "AMP in float16": amp(torch.float16),
    "AMP in bfloat16": amp(torch.bfloat16),
    "checkpointed": checkpointed(use_reentrant=False),
    "checkpointed, reentrant": checkpointed(use_reentrant=True),
    "saved and loaded": saved,
    "a collective of a subclass": of_a_subclass,
}


def main(folder: str, name: str) -> None:
    """Run a program in every order."""
    torch.set_num_threads(1)
    install()
    dist.init_process_group(
        NAME, init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=2
    )
    runs = []
    for order, seed in ORDERS:
        with simulated_device(order, seed + rank()) as device:
            losses = PROGRAMS[name]("sim", 2)
            dist.barrier()
            texts, digests = device.report().texts(), device.digests()
        runs.append({"losses": losses, "races": texts, "digests": digests})
    Path(folder, f"{rank()}.json").write_text(json.dumps(runs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
