"""A training loop of one's own that sends its numbers to trackers.

echelon run --ranks 2 examples/integrations/trackers.py tensorboard
WANDB_MODE=offline echelon run --ranks 2 examples/integrations/trackers.py wandb trackio
"""

import sys

import torch
from torch import nn

import echelon as ec

STEPS = 50


def main(world: ec.World, trackers: list[str]) -> None:
    torch.manual_seed(0)
    model = ec.DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)), world.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(world.rank)
    options = {"lr": 1e-2, "ranks": world.size}
    with ec.observe.track(world, "runs/tracked", *trackers, config=options) as tracking:
        for step in range(1, STEPS + 1):
            inputs = torch.randn(32, 16, generator=data)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            norm = ec.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tracking.log({"train/loss": loss, "train/gradient_norm": norm}, step)


if __name__ == "__main__":
    with ec.init() as world:
        main(world, sys.argv[1:] or ["tensorboard"])
