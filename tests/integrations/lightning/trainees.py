"""What the ranks of tests run: ``echelon run trainees.py FUNCTION RESULT ARGUMENTS``.

Rank 0 writes what the function returns to the file RESULT, with ``torch.save``.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
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

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

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
        return DDPStrategy(process_group_backend=name, find_unused_parameters=True)
    kind, _, choice = name.partition(" ")
    if kind == "plan":
        options = {"fsdp": {"min_num_params": 0}} if "shard" in choice else {}
        return EchelonStrategy(ec.Plan.parse(choice, **options))
    if kind == "fsdp":
        units = ec.units.by_type(nn.Linear)
        strategy = ec.Strategy[choice or "FULL_SHARD"]
        return EchelonStrategy("fsdp", units=units, strategy=strategy, min_num_params=0)
    return name


def trainer_of(strategy: str, **options: Any) -> L.Trainer:
    """A Trainer that prints nothing."""
    has_saves = any(isinstance(c, ModelCheckpoint) for c in options.get("callbacks", ()))
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": WORLD_SIZE if strategy in ("gloo", "echelon") else "auto",
        "strategy": strategy_of(strategy),
        "precision": "64-true",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "logger": False,
        "enable_checkpointing": has_saves,
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
    dtype = torch.float64 if trainer.precision == "64-true" else torch.float32
    trainer.fit(model, batches(4, dtype=dtype))
    if strategy in ("gloo", "echelon"):
        dist.destroy_process_group()  # so that the next strategy makes its own
    return {"weights": weights_of(trainer), "losses": model.losses}


def compare(*strategies: str) -> Any:
    """The same training with each strategy."""
    return {strategy: train(strategy) for strategy in strategies}


def compare_in(precision: str, *strategies: str) -> Any:
    """The same training with each strategy, clipped by value."""
    options = {"precision": precision, "gradient_clip_algorithm": "value"}
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


class LitPair(LitNet):
    """Two optimizers in turn, as of a GAN."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.automatic_optimization = False
        self.critic = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        self.manual_backward(self.loss(batch) + self.critic(self.net(batch[0])).mean())
        self.clip_gradients(first, 0.1, "norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        self.manual_backward(self.critic(self.net(batch[0]).detach()).square().mean())
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        trained = [param for param in self.net.parameters() if param.requires_grad]
        return [torch.optim.SGD(of, lr=0.1) for of in (trained, self.critic.parameters())]


def train_pair(strategy: str) -> dict[str, Tensor]:
    """The weights after manual optimization."""
    L.seed_everything(5, verbose=False)
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    trainer = trainer_of(strategy, max_epochs=1, **options)
    trainer.fit(LitPair(), batches(4))
    if strategy == "gloo":
        dist.destroy_process_group()
    return weights_of(trainer)


def train_pairs(*strategies: str) -> dict[str, dict[str, Tensor]]:
    return {strategy: train_pair(strategy) for strategy in strategies}


class ThawsLater(BaseFinetuning):
    """Trains one layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks[2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[2], optimizer, lr=1e-3)


def finetune() -> dict[str, Tensor]:
    """The weights after three epochs with batches of 12 over all ranks."""
    L.seed_everything(5, verbose=False)
    trainer = trainer_of("echelon_ddp", max_epochs=3, callbacks=[ThawsLater()])
    trainer.fit(LitNet(dropout=0.0), batches(12 // WORLD_SIZE, 96))
    return weights_of(trainer)


class LitPath(LitNet):
    """Has an argument that no checkpoint can hold."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.save_hyperparameters()


class ChangesWeights(Callback):
    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {"x": torch.ones(1)}


def refusal(call: Callable[[], object]) -> str:
    """The class and the sentence of the error of a call."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals(folder: str) -> dict[str, str]:
    """What cannot work, each with its sentence."""
    trainer = trainer_of("echelon_ddp", max_steps=2, callbacks=[ChangesWeights()])
    trainer.fit(LitNet(), batches(4))
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    fsdp = trainer_of("echelon_fsdp", max_steps=2, **options)
    averaging = [StochasticWeightAveraging(swa_lrs=1e-2)]
    fresh = EchelonStrategy()
    return {
        "hook": refusal(lambda: trainer.save_checkpoint(f"{folder}/hook.ckpt")),
        "storage": refusal(lambda: trainer.save_checkpoint(f"{folder}/a.ckpt", storage_options=1)),
        "remote": refusal(lambda: trainer_of("echelon_ddp", max_steps=1).fit(
            LitNet(), batches(4), ckpt_path="memory://a.ckpt")),
        "manual": refusal(lambda: fsdp.fit(LitPair(), batches(4))),
        "averaging": refusal(
            lambda: trainer_of("echelon_fsdp", max_steps=2, callbacks=averaging).fit(
                LitNet(), batches(4))),
        "pruning": refusal(
            lambda: trainer_of("echelon_fsdp", max_steps=2, callbacks=[ModelPruning(
                "l1_unstructured", amount=0.5)]).fit(LitNet(), batches(4))),
        "argument": refusal(
            lambda: trainer_of("echelon_ddp", max_steps=2, callbacks=[ModelCheckpoint(folder)]).fit(
                LitPath(Path(folder)), batches(4))),
        "finetuning": refusal(
            lambda: trainer_of("echelon_fsdp", max_steps=2, callbacks=[ThawsLater()]).fit(
                LitNet(), batches(4))),
        "devices": refusal(lambda: trainer_of("echelon_ddp", devices=3)),
        "batchnorm": refusal(lambda: trainer_of("echelon_ddp", sync_batchnorm=True)),
        "io": refusal(lambda: trainer_of("echelon_ddp", plugins=[AsyncCheckpointIO()])),
        "before": refusal(lambda: setattr(fresh, "checkpoint_io", AsyncCheckpointIO())),
    }  # fmt: skip


def odd_cases(folder: str) -> dict[str, Any]:
    """Fit, then evaluate; files of Lightning; links; weights alone; another plan."""
    L.seed_everything(5, verbose=False)
    plain = trainer_of("gloo", max_epochs=2)
    plain_model = LitNet(dropout=0.0)
    plain.fit(plain_model, batches(4))
    plain.save_checkpoint(f"{folder}/plain.ckpt")
    results: dict[str, Any] = {"plain": weights_of(plain)}
    more = trainer_of("gloo", max_epochs=3)
    # DDPStrategy loads before the precision plugin converts, so float32 would round the weights.
    in_float64 = LitNet(dropout=0.0).double()
    more.fit(in_float64, batches(4), ckpt_path=f"{folder}/plain.ckpt", weights_only=False)
    dist.destroy_process_group()
    results["plain, one more epoch"] = weights_of(more)
    rows = torch.ones(1, 8, dtype=torch.float64)
    for strategy in ("echelon_ddp", "fsdp"):
        goes_on = trainer_of(strategy, max_epochs=3)
        goes_on.fit(
            LitNet(dropout=0.0), batches(4), ckpt_path=f"{folder}/plain.ckpt", weights_only=False
        )
        results[f"{strategy}, one more epoch"] = weights_of(goes_on)
        saves = ModelCheckpoint(
            dirpath=f"{folder}/{strategy}", save_last="link", save_weights_only=True
        )
        trainer = trainer_of(strategy, max_epochs=2, callbacks=[saves])
        L.seed_everything(5, verbose=False)
        model = LitNet(dropout=0.0)
        trainer.fit(model, batches(4), batches(4))
        results[strategy] = weights_of(trainer)
        other = trainer_of("fsdp" if strategy == "echelon_ddp" else "echelon_ddp")
        last = f"{folder}/{strategy}/last.ckpt"
        results[f"{strategy}, evaluated"] = [
            trainer.validate(model, batches(4), verbose=False)[0]["validation"],
            trainer.test(model, batches(4), verbose=False)[0]["test"],
            len(trainer.predict(model, batches(4)) or []),
            other.validate(LitNet(), batches(4), ckpt_path=last, verbose=False)[0]["validation"],
            os.path.islink(last),
        ]
        results[f"{strategy}, after the fit"] = refusal(lambda m=model: m(rows))
    return results


def mixed(strategy: str) -> str:
    """The class of the scaler after a training with float16."""
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    options = {"precision": None, "plugins": [precision], "gradient_clip_val": None}
    trainer = trainer_of(strategy, max_steps=2, **options)
    trainer.fit(LitNet(), batches(4, dtype=torch.float32))
    assert precision.scaler is not None
    return f"{type(precision.scaler).__module__} {precision.scaler.get_scale()}"


class LitFailing(LitNet):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index == 3 and self.global_rank == 1:
            raise ValueError("this batch is broken")
        return super().training_step(batch, index)


def fail_on_one_rank(strategy: str) -> None:
    """An error of the user's code on rank 1 alone."""
    callbacks: list[Callback] = [ModelCheckpoint(dirpath="failed", save_on_exception=True)]
    trainer = trainer_of(strategy, max_epochs=1, callbacks=callbacks)
    trainer.fit(LitFailing(), batches(4))


def main(functions: dict[str, Any], function: str, result: str, *arguments: str) -> None:
    """Call a function with arguments in JSON, and write what it returns."""
    torch.set_num_threads(1)
    value = functions[function](*(json.loads(argument) for argument in arguments))
    if os.environ.get("RANK", "0") == "0":
        torch.save(value, result)


if __name__ == "__main__":
    main(globals(), *sys.argv[1:])
