"""What the ranks of the tests of Lightning run: ``echelon run trainees.py FUNCTION RESULT ARGUMENTS``.

Rank 0 writes what the function returns to the file RESULT, with ``torch.save``.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ec
import echelon.c10d
from echelon.checkpoint.files import NewFile
from echelon.integrations.lightning import EchelonStrategy

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class TiedNet(nn.Module):
    """A tied weight, a frozen layer, dropout and a buffer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 48, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.back = nn.Linear(8, 48, bias=False)
        self.back.weight = self.embed.weight
        self.dropout = nn.Dropout(dropout)
        self.blocks[1].requires_grad_(False)
        self.register_buffer("shift", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + self.dropout(block(x).tanh())
        return x @ self.back.weight + self.shift


class LitNet(L.LightningModule):
    """Trains ``TiedNet`` with a scheduler, and logs what callbacks monitor."""

    def __init__(self, lr: float = 1e-2, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = TiedNet(dropout)
        self.losses: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        mean = self.all_gather(loss.detach()).mean()
        self.losses.append(mean.item())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [param for param in self.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def batches(batch_size: int, num: int = 90, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    """Samples in an order that depends on the epoch alone; the last batch is short."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(num, 8, generator=generator, dtype=dtype) for _ in range(2))
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)


def strategy_of(name: str) -> Any:
    """A strategy by its name here."""
    if name in ("gloo", "echelon"):
        return DDPStrategy(process_group_backend=name)
    kind, _, choice = name.partition(" ")
    if kind == "plan":
        options = {"fsdp": {"min_num_params": 0}} if "shard" in choice else {}
        return EchelonStrategy(ec.Plan.parse(choice, **options))
    if kind == "fsdp":
        units = ec.units.by_type(nn.Linear)
        strategy = ec.Strategy[choice or "FULL_SHARD"]
        return EchelonStrategy("fsdp", units=units, sharding_strategy=strategy, min_num_params=0)
    return name


def trainer_of(strategy: str, **options: Any) -> L.Trainer:
    """A Trainer that prints nothing."""
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": WORLD_SIZE if strategy in ("gloo", "echelon") else "auto",
        "strategy": strategy_of(strategy),
        "precision": "64-true",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "logger": False,
        "enable_checkpointing": "callbacks" in options,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**{**given, **options})


def weights_of(trainer: L.Trainer) -> dict[str, Tensor]:
    """The full weights, on all ranks."""
    model = trainer.strategy.model
    assert model is not None
    names = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    return {name: value.detach().clone() for name, value in names.items()}


def train(strategy: str, **options: Any) -> dict[str, Any]:
    """20 steps, and the weights and losses."""
    L.seed_everything(5, verbose=False)
    model = LitNet()
    trainer = trainer_of(strategy, max_steps=20, **options)
    trainer.fit(model, batches(4))
    if strategy in ("gloo", "echelon"):
        dist.destroy_process_group()  # so that the next strategy makes its own
    return {"weights": weights_of(trainer), "losses": model.losses}


def compare(*strategies: str, precision: str = "64-true", clip: str = "norm") -> Any:
    """The same training with each strategy."""
    options = {"precision": precision, "gradient_clip_algorithm": clip}
    return {strategy: train(strategy, **options) for strategy in strategies}


class DiesInSave:
    """Kills a rank by SIGKILL while it writes its n-th file of a checkpoint."""

    def __init__(self, times: int) -> None:
        self.times, self.files = times, set[Path]()
        self.write = NewFile.write
        NewFile.write = self  # type: ignore[assignment, method-assign]

    def __get__(self, file: NewFile, owner: type) -> Callable[[memoryview], str]:
        return lambda data: self.count(file, data)

    def count(self, file: NewFile, data: memoryview) -> str:
        written = self.write(file, data)
        self.files.add(file.path.parent)
        if len(self.files) == self.times:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def fit_and_save(
    strategy: str, folder: str, resumes: bool = False, dies_at: int = 0, epochs: int = 4
) -> dict[str, Any]:
    """Train with batches of 12 over all ranks; save the best two epochs, and the last."""
    if dies_at and os.environ["RANK"] == "1":
        DiesInSave(dies_at)
    L.seed_everything(5, verbose=False)
    model = LitNet(dropout=0.0)
    best = ModelCheckpoint(dirpath=folder, save_top_k=2, monitor="validation", save_last=True)
    callbacks: list[Callback] = [best, EarlyStopping("validation", patience=3)]
    trainer = trainer_of(strategy, max_epochs=epochs, callbacks=callbacks)
    samples = batches(12 // WORLD_SIZE, 96)
    trainer.fit(model, samples, batches(8), ckpt_path="last" if resumes else None)
    files = sorted(os.listdir(folder))
    return {
        "weights": weights_of(trainer),
        "losses": model.losses,
        "files": files,
        "step": trainer.global_step,
        "best": best.best_model_path,
    }


def main(function: str, result: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    target: Callable[..., Any] = globals()[function]
    value = target(*(json.loads(argument) for argument in arguments))
    if os.environ.get("RANK", "0") == "0":
        torch.save(value, result)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    main(*sys.argv[1:])
