"""Train a small model with Lightning Fabric and FSDP of echelon.

echelon run --ranks 2 examples/integrations/fabric.py
"""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon.integrations.lightning  # noqa: F401  # registers "echelon_fsdp"


def main() -> None:
    fabric = L.Fabric(accelerator="cpu", strategy="echelon_fsdp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)

    x = torch.randn(512, 32)
    samples = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    samples = fabric.setup_dataloaders(samples)

    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if os.path.exists("fabric.ckpt"):
        fabric.load("fabric.ckpt", state)
    for epoch in range(state["epoch"], 3):
        for step, (inputs, targets) in enumerate(samples):
            accumulates = step % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = nn.functional.mse_loss(model(inputs), targets)
                fabric.backward(loss)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        state["epoch"] = epoch + 1
        fabric.save("fabric.ckpt", state)
        mean = fabric.all_reduce(loss.detach())
        fabric.print(f"epoch {epoch}: loss {mean.item():.6f}")


if __name__ == "__main__":
    main()
