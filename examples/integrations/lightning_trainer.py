"""Train, validate and resume with Lightning's Trainer and FSDP of echelon.

    echelon run --ranks 2 examples/integrations/lightning_trainer.py

Run it again, also with another number of ranks, and it goes on from the last epoch. It takes
``echelon_ddp`` as an argument, too.
"""

import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import echelon.integrations.lightning  # noqa: F401  # registers "echelon_fsdp"


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("validation", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(strategy: str = "echelon_fsdp") -> None:
    L.seed_everything(0, verbose=False)
    x = torch.randn(640, 32)
    samples = TensorDataset(x, x.sum(1, keepdim=True))
    training, validation = torch.utils.data.random_split(samples, [512, 128])
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(dirpath="lightning", monitor="validation", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Regression(),
        DataLoader(training, batch_size=16, shuffle=True),
        DataLoader(validation, batch_size=16),
        ckpt_path="last",
    )
    epoch = trainer.current_epoch  # a job that has all its epochs already trains no more
    (metrics,) = trainer.validate(
        trainer.lightning_module, DataLoader(validation, batch_size=16), verbose=False
    )
    if trainer.is_global_zero:
        print(f"epoch {epoch}: validation {metrics['validation']:.6f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
