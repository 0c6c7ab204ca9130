"""What is saved when a process is killed, and what must be there afterwards.

A scene puts an old version, if it has one, and a new one; both are a ``Linear`` whose weights are
all 1 or all 2. After a kill one of them is there whole, and nothing else is taken for a model.
"""

from __future__ import annotations

import logging
import os
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

import echelon as ec
from echelon.checkpoint.convert.convert import ConvertOptions, Form, convert
from echelon.checkpoint.coordinator import named
from echelon.process.atomic_files import replace_file

OLD, NEW = 1.0, 2.0


def linear(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    for param in model.parameters():
        param.data.fill_(value)
    return model


def value_of(weight: torch.Tensor) -> float:
    """The value that all elements have."""
    (value,) = {*weight.flatten().tolist()}
    return float(value)


def loaded(path: Path, **more: Any) -> float:
    model = linear(0.0)
    ec.load(path, model=model, strict=False, **more)
    return value_of(model.weight)


class Scene(ABC):
    """One way to save. Abstract."""

    has_old = True
    modules: tuple[str, ...] = ()  # which it imports
    _lasting: frozenset[str] = frozenset()  # what may begin with a dot in the folder afterwards

    @abstractmethod
    def put(self, folder: Path, value: float) -> None:
        """Save a version."""

    @abstractmethod
    def look(self, folder: Path) -> float | None:
        """The value of the version that a user finds; None if there is none at all."""

    @final
    def left(self, folder: Path) -> list[str]:
        """What saves have left behind."""
        names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
        return [
            name
            for name in names
            if any(part[0] == "." and part not in self._lasting for part in Path(name).parts)
        ]


class Overwritten(Scene):
    _lasting = frozenset({".lock"})

    def put(self, folder: Path, value: float) -> None:
        ec.save(folder / "run", step=1, model=linear(value), overwrite=True)

    def look(self, folder: Path) -> float | None:
        return loaded(folder / "run")


class OneFile(Scene):
    def put(self, folder: Path, value: float) -> None:
        try:
            replace_file(folder / "page", str(value).encode() * 1000)
        except OSError as error:
            raise named(error, None) from error

    def look(self, folder: Path) -> float | None:
        data = (folder / "page").read_text()
        assert data in (str(OLD) * 1000, str(NEW) * 1000)
        return OLD if data.startswith(str(OLD)) else NEW


class Converted(Scene):
    has_old = False
    _lasting = frozenset({".metadata"})

    def __init__(self, name: str, options: ConvertOptions) -> None:
        self._name, self._options = name, options

    def put(self, folder: Path, value: float) -> None:
        source = folder.with_name(f"source-{value}")
        if not source.exists():
            ec.save(source, step=1, model=linear(value))
        convert(source, folder / self._name, self._options)

    def look(self, folder: Path) -> float | None:
        target = folder / self._name
        if not os.path.lexists(target):
            return None
        again = folder.with_name(f"again-{folder.name}-{len(os.listdir(folder.parent))}")
        convert(target, again, ConvertOptions(to=Form.ECHELON, trust_pickle=True))
        return loaded(again)


class Lightning(Scene):
    """``Trainer.save_checkpoint`` to a path with nothing, a file of Lightning's, or a folder."""

    modules = ("echelon.integrations.lightning",)
    _lasting = frozenset({".lock", ".written-by-lightning"})

    def __init__(self, before: str) -> None:
        self.has_old, self._before = before != "nothing", before

    @staticmethod
    def _trainer(strategy: str) -> Any:
        import lightning as L

        import echelon.integrations.lightning  # noqa: F401

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = linear(OLD)

            def training_step(self, batch: Any, index: int) -> Any:
                return self.net(batch[0]).square().mean()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        rows = torch.utils.data.TensorDataset(torch.ones(4, 3))
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = L.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=1,
            enable_checkpointing=False, **quiet,
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=2))
        return trainer

    def put(self, folder: Path, value: float) -> None:
        is_file = value == OLD and self._before == "file"
        trainer = self._trainer("auto" if is_file else "echelon_ddp")
        for param in trainer.lightning_module.net.parameters():
            param.data.fill_(value)
        trainer.save_checkpoint(folder / "last.ckpt")

    def look(self, folder: Path) -> float | None:
        path = folder / "last.ckpt"
        if path.is_file():
            state = torch.load(path, weights_only=False)
            return value_of(state["state_dict"]["net.weight"])
        if not os.path.lexists(path):
            return None
        model = nn.Module()
        model.net = linear(0.0)
        ec.load(path, model=model, strict=False, rng=False)
        return value_of(model.net.weight)


class Transformers(Scene):
    """A save of ``EchelonTrainer`` as the next step, or as the same step again."""

    modules = ("echelon.integrations.transformers",)
    _lasting = frozenset({".lock"})

    def __init__(self, again: bool) -> None:
        self._again = again

    @staticmethod
    def _trainer(folder: Path) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

        from echelon.integrations.transformers import EchelonTrainer

        rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 4
        sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
        arguments = TrainingArguments(
            str(folder), use_cpu=True, max_steps=1, save_strategy="no", report_to=[],
            save_total_limit=1, disable_tqdm=True, per_device_train_batch_size=4,
        )  # fmt: skip
        model = GPT2LMHeadModel(GPT2Config(vocab_size=16, **sizes))
        trainer = EchelonTrainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        return trainer

    def put(self, folder: Path, value: float) -> None:
        trainer = self._trainer(folder)
        trainer.state.global_step = 1 if self._again else int(value)
        for param in trainer.model.parameters():
            param.data.fill_(value)
        trainer._save_checkpoint(trainer.model, None)

    def look(self, folder: Path) -> float | None:
        from transformers import GPT2LMHeadModel
        from transformers.trainer_utils import get_last_checkpoint

        path = get_last_checkpoint(str(folder))
        assert path is not None
        model = GPT2LMHeadModel.from_pretrained(path)
        value = value_of(model.transformer.wpe.weight)
        assert (Path(path) / "trainer_state.json").is_file()
        ec.load(Path(path) / "echelon", model=model, strict=False, rng=False)
        assert value_of(model.transformer.wpe.weight) == value
        return value


class Accelerated(Scene):
    modules = ("echelon.integrations.accelerate",)
    _lasting = frozenset({".lock", ".written-by-accelerate"})

    @staticmethod
    def _accelerator() -> Any:
        from echelon.integrations.accelerate import EchelonAccelerator

        accelerator = EchelonAccelerator(cpu=True)
        return accelerator, accelerator.prepare(linear(OLD))

    def put(self, folder: Path, value: float) -> None:
        accelerator, model = self._accelerator()
        for param in model.parameters():
            param.data.fill_(value)
        accelerator.save_state(folder / "state")

    def look(self, folder: Path) -> float | None:
        accelerator, model = self._accelerator()
        accelerator.load_state(folder / "state")
        return value_of(next(iter(model.parameters())).data)


SCENES: dict[str, Scene] = {
    "overwrite": Overwritten(),
    "file": OneFile(),
    "convert-file": Converted("a.safetensors", ConvertOptions()),
    "convert-shards": Converted("hf", ConvertOptions(shard_nbytes=16)),
    "convert-torch": Converted("a.pt", ConvertOptions()),
    "convert-dcp": Converted("dcp", ConvertOptions(to=Form.DCP)),
    "lightning-first": Lightning("nothing"),
    "lightning-file": Lightning("file"),
    "lightning-later": Lightning("folder"),
    "trainer-next": Transformers(again=False),
    "trainer-again": Transformers(again=True),
    "accelerate": Accelerated(),
}


def quiet() -> None:
    """Say nothing of what does not matter here."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
