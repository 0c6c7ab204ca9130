"""A training of a small GPT-2 by ``Trainer``, that tests run in several ways.

GPT-2 and this loss compute in the dtype of the model; Llama norms in float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from tests.transformers_models import VOCABULARY, of_gpt2

GLOBAL_BATCH = 12


def gpt2(dtype: torch.dtype = torch.float64) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(of_gpt2(width=16, layers=2)).to(dtype)


def rows(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Sequences of one length, of whose tokens some do not count."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for tokens in torch.randint(VOCABULARY, (count, 12), generator=generator):
        labels = tokens.clone()
        labels[: int(torch.randint(1, 6, (), generator=generator))] = -100
        data.append({"input_ids": tokens, "labels": labels})
    return data


def token_loss(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = output.logits[:, :-1].flatten(0, 1)
    total = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def arguments(folder: str, stages: int = 1, **options: Any) -> TrainingArguments:
    """Twenty steps of two batches; seven batches are an epoch."""
    batch = GLOBAL_BATCH * stages // int(os.environ.get("WORLD_SIZE", "1"))
    values = {
        "use_cpu": True,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "max_grad_norm": 0.3,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    return TrainingArguments(folder, **{**values, **options})


def make(
    kind: Callable[..., Trainer], folder: str, *, stages: int = 1, model: Any = None, **options: Any
) -> Trainer:
    """A trainer; ``options`` are those of ``TrainingArguments``, and of the trainer in ``own``."""
    own = {"compute_loss_func": token_loss, **options.pop("own", {})}
    own.setdefault("train_dataset", rows(84))
    return kind(
        model=gpt2() if model is None else model, args=arguments(folder, stages, **options), **own
    )


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights_in(folder: str) -> dict[str, Tensor]:
    return load_file(f"{folder}/model.safetensors")


def train(kind: Callable[..., Trainer], folder: str, **options: Any) -> dict[str, Any]:
    """Train and save the weights in ``folder``."""
    trainer = make(kind, folder, **options)
    trainer.train()
    trainer.save_model()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "losses": losses_of(trainer),
        "norms": norms,
        "flos": trainer.state.total_flos,
        "log": trainer.state.log_history,
    }
