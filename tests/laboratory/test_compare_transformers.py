"""No alarm for models of ``transformers``, with every plan that they can be trained by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import echelon as ec
from tests.laboratory.tasks import adamw

VOCABULARY = 37
SHARDED: dict[str, Any] = {"fsdp": {"min_num_params": 0}}
PIPED: dict[str, Any] = {"microbatches": 2}
WITHOUT_STAGES = {
    "dp=2": {},
    "dp=4": {},
    "shard=2": SHARDED,
    "shard=4": {**SHARDED, "strategy": ec.Strategy.SHARD_GRAD_OP},
    "dp=2,shard=2": SHARDED,
}
PLANS = {
    **WITHOUT_STAGES,
    "pp=2": PIPED,
    "pp=2,dp=2": {**PIPED, "schedule": "zb-h1"},
    "pp=2,shard=2": {**PIPED, **SHARDED},
}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "use_cache": False,
}


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=3)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        **SIZES,
        num_hidden_layers=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        experts_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=3,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(1, VOCABULARY, (8, 6), generator=generator)


def texts() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [({"input_ids": tokens(generator)}, tokens(generator)) for _ in range(2)]


def pairs_of_texts() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            {"input_ids": tokens(generator), "decoder_input_ids": tokens(generator)},
            tokens(generator),
        )
        for _ in range(2)
    ]


def images() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            {"pixel_values": torch.randn(8, 3, 8, 8, generator=generator)},
            torch.randint(5, (8,), generator=generator),
        )
        for _ in range(2)
    ]


def loss(output: Any, target: Tensor) -> Tensor:
    logits = output.logits if hasattr(output, "logits") else output["logits"]
    return cross_entropy(logits.flatten(0, -2), target.flatten())


FAMILIES: dict[Callable[[], nn.Module], Callable[[], list[Any]]] = {
    llama: texts,
    gpt2: texts,
    vit: images,
    mixtral: texts,
}
CASES = [(family, batches, plan) for family, batches in FAMILIES.items() for plan in PLANS] + [
    (t5, pairs_of_texts, plan) for plan in WITHOUT_STAGES
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "batches", "name"),
    [pytest.param(*case, id=f"{case[0].__name__} {case[2]}") for case in CASES],
)
def test_a_family_of_transformers_is_the_same_with_every_plan(
    family: Callable[[], nn.Module], batches: Callable[[], list[Any]], name: str
) -> None:
    plan = ec.Plan.parse(name, **PLANS[name])
    result = ec.compare(family, batches(), plan, loss_fn=loss, optimizer=adamw, steps=2)
    assert result.same, str(result)
    assert max(result.largest.values()) < 1e-12
    assert min(result.compared[kind] for kind in list(ec.ValueKind)[2:] if kind.name != "BUFFER")
