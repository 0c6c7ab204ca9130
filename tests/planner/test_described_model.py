"""A model is taken from sizes, from a file, or from a configuration of transformers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import echelon as ec
from echelon.planner.described_model import described
from tests.planner.sizes import MODEL

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def test_a_configuration_is_read_as_its_file_is(tmp_path: Path) -> None:
    config = SimpleNamespace(model_type="llama", to_dict=lambda: dict(CONFIG))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = described(config)  # type: ignore[arg-type]
    assert model == described(tmp_path) == described(str(tmp_path / "config.json"))
    assert (model.layers, model.kv_heads, model.seq) == (3, 2, 32)


def test_a_configuration_of_transformers_has_the_parameters_of_its_model() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert described(config).num_parameters == sum(p.numel() for p in model.parameters())


def test_another_length_of_sequences_may_be_given() -> None:
    assert described(MODEL) is MODEL
    assert described(MODEL, seq=64).seq == 64
    config = SimpleNamespace(model_type="llama", to_dict=lambda: dict(CONFIG))
    assert described(config, seq=16).seq == 16  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 3, [MODEL], {"model_type": "llama"}, type(MODEL)])
def test_what_describes_no_model_is_refused(value: Any) -> None:
    with pytest.raises(ec.ArgumentError, match=r"model is .*; give a torch\.nn\.Module"):
        described(value)
