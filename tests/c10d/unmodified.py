"""Training programs that know only ``torch.distributed``; each returns what rank 0 has learnt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
State = dict[str, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    return nn.Sequential(*layers).double()


def train(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        inputs = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module) -> State:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def data_parallel(folder: Path) -> State:
    model = DistributedDataParallel(network())
    train(model, dist.get_rank())
    return state_of(model.module)


def fully_sharded(folder: Path) -> State:
    model = network()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    train(model, dist.get_rank())
    return state_of(model)


def saved_and_loaded(folder: Path) -> State:
    """Sharded over all ranks, saved, and loaded into a model that is sharded otherwise."""
    model = network()
    fully_shard(model)
    train(model, dist.get_rank())
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder / "checkpoint")
    other = network()
    for layer in (other[0], other[2]):
        fully_shard(layer)
    state: dict[str, Any] = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=folder / "checkpoint")
    other.load_state_dict(state["model"])
    return state_of(other)


def tensor_and_data_parallel(folder: Path) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model: nn.Module = network()
    model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    train(model, mesh["dp"].get_local_rank())
    return state_of(model)


def pipelined(folder: Path) -> State:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(size)]
    stage = PipelineStage(stages[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2 * size, loss_fn=mse_loss)
    optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs, target = torch.randn(2, 16, 8, generator=generator, dtype=torch.float64)
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=target)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    states: list[Any] = [None] * size
    dist.all_gather_object(states, state_of(stages[rank]))
    return {f"{place}.{name}": v for place, state in enumerate(states) for name, v in state.items()}


PROGRAMS: tuple[Callable[[Path], State], ...] = (
    data_parallel,
    fully_sharded,
    saved_and_loaded,
    tensor_and_data_parallel,
    pipelined,
)


def run_all(world: object, folder: str) -> dict[str, State]:
    """All programs, one after another, in the default process group."""
    dist.init_process_group("gloo")
    states = {program.__name__: program(Path(folder)) for program in PROGRAMS}
    dist.destroy_process_group()
    return states
