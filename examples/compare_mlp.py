"""What ``echelon compare`` needs of a script: a model, batches, a loss, an optimizer, and a loop.

Run ``echelon compare examples/compare_mlp.py --ranks 4``. Replace ``"mean"`` by ``"sum"`` in the
loop to see a mistake named.
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss as loss_fn

import echelon as ec

torch.manual_seed(0)
batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def train(world: ec.World, model: nn.Module, batches, optimizer) -> None:
    """One step for each batch, of which this rank takes every world.size-th row."""
    stepper = optimizer(model.parameters())
    for x, y in batches:
        rows = slice(world.rank, None, world.size)
        loss_fn(model(x[rows]), y[rows]).backward()
        for param in model.parameters():
            world.group.all_reduce(param.grad, "mean")
        stepper.step()
        stepper.zero_grad()
