"""A training that knows only PyTorch: DDP, over whatever starts it.

``echelon run --world threads --ranks 8 examples/torch_ddp.py``, or ``torchrun``. With ``--rows 65``
rank 0 has a batch more than the others, and waits for them without end.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(num_rows: int) -> None:
    """One epoch; each rank takes its rows, two in a batch."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(num_rows, 16)
    y = x.sum(dim=1, keepdim=True)
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for rows, targets in zip(x[mine].split(2), y[mine].split(2), strict=True):
        loss = nn.functional.mse_loss(model(rows), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss of rank 0 in its last batch: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64, help="of all ranks")
    train(parser.parse_args().rows)
