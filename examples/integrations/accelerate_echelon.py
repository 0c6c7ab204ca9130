"""The training of ``accelerate_plain.py`` with a model that FSDP shares. Two lines differ.

``echelon run --ranks 2 accelerate_echelon.py``, or ``torchrun --nproc-per-node 2 ...``, or Python.
"""

from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon.integrations.accelerate import EchelonAccelerator

STATE = Path("runs/accelerate")
NUM_EPOCHS = 3


def main() -> None:
    """Learn the sum of eight numbers; a second start goes on from the state of the first."""
    accelerator = EchelonAccelerator(plan="fsdp", cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model.append(nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(1024, 8)
    rows = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(rows, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if STATE.exists():
        accelerator.load_state(STATE)

    for epoch in range(NUM_EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        losses = accelerator.gather_for_metrics(loss.detach()[None])
        accelerator.print(f"epoch {epoch}: loss {losses.mean():.4f}")

    accelerator.save_state(STATE)
    accelerator.save_model(model, "runs/accelerate-model")


if __name__ == "__main__":
    main()
