"""A small model, its batches, and training of it by one process on the CPU, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from echelon.comm.torch_dist import connect
from echelon.process.environment import JobEnvironment
from tests import reference
from tests.processes import free_port

WIDTH, BLOCKS, ROWS, STEPS = 8, 4, 4, 2
RANKS = 2  # simulated ones
with_simulated_ranks = True  # the sanitizer sees one rank only
job: ec.World | None = None  # of processes, each of which has a device


class Block(nn.Module):
    """A layer whose bias no number of ranks divides, a norm, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(device: torch.device | str = "cpu") -> nn.Sequential:
    """The same weights each time."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 2)]
    return nn.Sequential(*layers).double().to(device)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    options: Any = {"generator": generator, "dtype": torch.float64}
    return torch.randn(ROWS, 3, **options), torch.randn(ROWS, 2, **options)


def batch_on(device: torch.device, step: int, rank: int) -> list[Tensor]:
    """The same, on a device."""
    return [tensor.to(device) for tensor in batch(step, rank)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of the trainable parameters that this rank has."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def train(model: nn.Module, world: ec.World, steps: int = STEPS) -> torch.optim.Optimizer:
    """Train a wrapped model on this rank's batches."""
    optimizer = optimizer_of(model)

    def losses(step: int) -> Iterator[Tensor]:
        inputs, targets = batch_on(world.device, step, world.rank)
        yield F.mse_loss(model(inputs), targets)
        ec.clip_grad_norm_(model, 0.3)

    reference.train(optimizer, steps, losses)
    return optimizer


@cache
def trained_plainly(ranks: int, steps: int = STEPS, clip: float = 0.3) -> dict[str, Tensor]:
    """The state that one process reaches on the batches of all ranks together."""
    model = build()

    def losses(step: int) -> Iterator[Tensor]:
        columns = zip(*(batch(step, rank) for rank in range(ranks)), strict=True)
        inputs, targets = (torch.cat(column) for column in columns)
        yield F.mse_loss(model(inputs), targets)
        nn.utils.clip_grad_norm_(model.parameters(), clip)

    return reference.train_alone(model, optimizer_of(model), steps, losses)


def assert_trained(state: Mapping[str, Tensor], ranks: int, steps: int = STEPS) -> None:
    """Compare a state with that of one process."""
    on_cpu = {name: value.cpu() for name, value in state.items()}
    # The kernels of a device sum in another order than those of the CPU.
    reference.assert_states_close(on_cpu, trained_plainly(ranks, steps), rtol=1e-9, atol=1e-11)


def on_one_rank(device: str, function: Callable[[ec.World], Any]) -> Any:
    """What ``function`` returns in a world of one rank over NCCL; over gloo on the CPU."""
    job = JobEnvironment(
        launcher="torchrun",
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        master_addr="127.0.0.1",
        master_port=free_port(),
    )
    place = torch.device(device) if device == "cpu" else torch.device(device, 0)
    with connect(job, dist.get_default_backend_for_device(device), device=place) as world:
        return function(world)


def on_all(device: str, function: Callable[[ec.World], Any]) -> list[tuple[int, Any]]:
    """What ``function`` returns on one rank and on simulated ranks, each after their number.

    In a job: what it returns on this rank of it.
    """
    if job is not None:
        return [(job.size, function(job))]
    results = [(1, on_one_rank(device, function))]
    if with_simulated_ranks:
        results += [(RANKS, result) for result in ec.run(function, RANKS, device=device)]
    return results
