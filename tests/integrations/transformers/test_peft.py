"""Adapters of ``peft`` on frozen models, also on one of whole numbers, by ``EchelonTrainer``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import echelon as ec
from tests.integrations.jobs import run_job
from tests.integrations.transformers.gpt_training import gpt2, make
from tests.integrations.transformers.test_trainer import SMALL, kind_of

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
HERE = "tests.integrations.transformers.test_peft"


class Int8Projection(nn.Module):
    """A frozen layer with weights of whole numbers, and a scale for each output."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(0) / 127
        whole = (layer.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_buffer("codes", torch.arange(whole.shape[1], dtype=torch.int32))
        self.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) * self.scale
        return x @ weight[:, self.codes.long()] + self.bias


def adapted(*, quantised: bool) -> Any:
    model = gpt2()
    if quantised:
        for block in model.transformer.h:
            block.mlp.c_fc = Int8Projection(block.mlp.c_fc)
            block.mlp.c_proj = Int8Projection(block.mlp.c_proj)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0
    )
    torch.manual_seed(2)
    with warnings.catch_warnings():
        # peft 0.21 reads a name that transformers 5.23 has deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return peft.get_peft_model(model, config).double()


def train(kind: Any, folder: str, *, quantised: bool, **options: Any) -> dict[str, Any]:
    model = adapted(quantised=quantised)
    trainer = make(kind, folder, model=model, weight_decay=0.0, max_steps=12, **options)
    trainer.train()
    trainer.save_model()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {"state": state, "log": trainer.state.log_history}


def under_fsdp(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for quantised in (False, True):
        name = f"{folder}/{quantised}"
        saves = {"save_strategy": "steps", "save_steps": 6}
        fsdp = kind_of("fsdp", options=SMALL)
        results[name] = train(fsdp, name, quantised=quantised, **saves)
        fsdp = kind_of("fsdp", options={**SMALL, "strategy": ec.Strategy.SHARD_GRAD_OP})
        trainer = make(
            fsdp, name, model=adapted(quantised=quantised), weight_decay=0.0, max_steps=12
        )
        trainer.train(resume_from_checkpoint=f"{name}/checkpoint-6")
        results[f"{name} resumed"] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return results


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_on_frozen_and_on_quantised_models_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    ranks = run_job(f"{HERE}:under_fsdp", 2, str(tmp_path))
    for quantised in (False, True):
        name = f"{tmp_path}/{quantised}"
        found = ranks[0][name]["state"]
        expected = train(
            transformers.Trainer, str(tmp_path / f"plain {quantised}"), quantised=quantised
        )["state"]
        assert found.keys() == expected.keys()
        whole = [name for name, value in found.items() if not value.is_floating_point()]
        assert len(whole) == (8 if quantised else 0)
        resumed = ranks[0][f"{name} resumed"]
        for key, value in expected.items():
            close = {"rtol": 1e-12, "atol": 1e-12} if "lora" in key else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found[key], value, **close)
            assert torch.equal(resumed[key], found[key])
        adapters = load_file(f"{name}/adapter_model.safetensors")
        assert len(adapters) == 4
        for key, value in adapters.items():
            assert torch.equal(value, found[key.replace(".weight", ".default.weight")])
