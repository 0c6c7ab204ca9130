"""Simulated ranks build models of the transformers library as processes do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.transformers_models import VOCABULARY, of_gpt2, of_llama

RANKS = 4


BUILDS = 20


def of_t5() -> Any:
    return pytest.importorskip("transformers").T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2
    )


def of_mixtral() -> Any:
    return pytest.importorskip("transformers").MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        max_position_embeddings=16,
        experts_implementation="eager",
    )


def of_vit() -> Any:
    return pytest.importorskip("transformers").ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )


ARCHITECTURES = {
    "LlamaForCausalLM": lambda: of_llama("Llama", width=16, layers=2),
    "GPT2LMHeadModel": lambda: of_gpt2(width=16, layers=1),
    "T5ForConditionalGeneration": of_t5,
    "MixtralForCausalLM": of_mixtral,
    "ViTForImageClassification": of_vit,
}


def built(architecture: str, seed: int) -> dict[str, Tensor]:
    library = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    model = getattr(library, architecture)(ARCHITECTURES[architecture]())
    return dict(model.state_dict())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_transformers_model_is_built_as_in_one_process(architecture: str) -> None:
    expected = [built(architecture, seed) for seed in range(BUILDS)]

    def main(world: ec.World) -> list[dict[str, Tensor]]:
        return [built(architecture, seed) for seed in range(BUILDS)]

    for models in ec.run(main, RANKS):
        for model, wanted in zip(models, expected, strict=True):
            assert_same(model, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_twenty_runs_build_the_bits_of_one_process(architecture: str, ranks: int) -> None:
    def main(world: ec.World) -> dict[str, Tensor]:
        state = built(architecture, 0)
        world.group.barrier()
        return state

    expected = built(architecture, 0)
    for _ in range(BUILDS):
        for state in ec.run(main, ranks):
            assert_same(state, expected)


@pytest.mark.slow
def test_ranks_load_and_build_models_of_several_dtypes_at_once(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    config = of_llama("Llama", width=16, layers=1)
    library.LlamaForCausalLM(config).save_pretrained(tmp_path)

    def load() -> dict[str, Tensor]:
        model = library.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return dict(model.state_dict())

    def make() -> dict[str, Tensor]:
        torch.manual_seed(1)
        own = of_llama("Llama", width=16, layers=1)
        model = library.LlamaForCausalLM._from_config(own, dtype=torch.float64)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return dict(model.state_dict())

    def plain() -> dict[str, Tensor]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 4), nn.MultiheadAttention(4, 2))
        numbers = torch.arange(5) / 2
        return {**model.state_dict(), "numbers": numbers, "grid": torch.linspace(0, 1, 3)}

    tasks: list[Callable[[], dict[str, Tensor]]] = [load, make, plain, plain]
    expected = [task() for task in tasks]

    def main(world: ec.World) -> list[dict[str, Tensor]]:
        return [tasks[world.rank]() for _ in range(10)]

    for rank, results in enumerate(ec.run(main, RANKS)):
        for result in results:
            assert_same(result, expected[rank])


def test_a_rank_that_skips_weights_leaves_those_of_the_others() -> None:
    pytest.importorskip("transformers")
    from transformers import initialization

    architecture = "GPT2LMHeadModel"
    expected = built(architecture, 3)

    def main(world: ec.World) -> dict[str, Tensor]:
        if world.rank:
            world.group.barrier()
            model = built(architecture, 3)
            world.group.barrier()
            return model
        with initialization.no_init_weights(), initialization.no_tie_weights():
            world.group.barrier()  # ranks may wait for one another inside of it
            model = built(architecture, 4)
            world.group.barrier()
        return model

    skipped, *others = ec.run(main, RANKS)
    for model in others:
        assert_same(model, expected)
    name = "transformer.h.0.mlp.c_fc.weight"
    # Built only now: memory that such a model has freed would have the same weights.
    assert not torch.equal(skipped[name], built(architecture, 4)[name])
