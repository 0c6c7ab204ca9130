"""A compiled model trains in PyTorch's own DDP on our groups as one that is not compiled."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon as ec


def trains(world: ec.World, compiled: bool) -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        forward(torch.full((2, 4), world.rank + step + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("world", ["threads", "processes"])
def test_compiled_ddp_trains_as_ddp(world: str) -> None:
    for compiled, plain in zip(
        *(ec.run(trains, 2, world, args=(compiled,)) for compiled in (True, False)), strict=True
    ):
        torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-7)  # fused operations
