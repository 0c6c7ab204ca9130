from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

import echelon as ec
from echelon.planner.transformer import Transformer
from tests.planner.sizes import MODEL


def count(config: object) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(param.numel() for param in model.parameters())


def test_parameters_are_those_of_llama_with_grouped_queries() -> None:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
    )
    model = Transformer(
        layers=3, hidden=256, heads=8, kv_heads=2, head_dim=32, ffn=688, gated=True, vocab=1000,
        seq=128, tied=False,
    )  # fmt: skip
    assert model.num_parameters == count(config)


def test_parameters_are_those_of_gpt2_with_biases_and_positions() -> None:
    config = GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=500, n_positions=64)
    model = Transformer(
        layers=2, hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=512, gated=False, vocab=500,
        seq=64, tied=True, positions=64, biases=True,
    )  # fmt: skip
    assert model.num_parameters == count(config)


def test_parameters_are_those_of_a_mixture_of_experts() -> None:
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=300,
    )
    model = Transformer(
        layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, gated=True, vocab=300,
        seq=32, tied=False, experts=4, active_experts=2,
    )  # fmt: skip
    assert model.num_parameters == count(config)


def test_flops_by_hand() -> None:
    matrices = 4 * 1024 * 1024 + 2 * 1024 * 4096
    attention = 2 * 2048 * 1024
    per_token = 2 * 4 * (matrices + attention) + 2 * 1024 * 32768
    assert MODEL.flops(causal=False) == 3 * per_token * 2048
    assert MODEL.flops() == 3 * (per_token - 4 * attention) * 2048


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ec.ArgumentError, match="kv_heads is 3, which does not divide heads, 8"):
        Transformer(
            layers=1, hidden=8, heads=8, kv_heads=3, head_dim=1, ffn=8, gated=False, vocab=8,
            seq=8, tied=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("tied", None), ("gated", "no"), ("biases", []), ("positions", "8"), ("positions", -1)],
)
def test_a_size_of_another_type_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ec.ArgumentError, match=f"{field} is"):
        replace(MODEL, **{field: value})
