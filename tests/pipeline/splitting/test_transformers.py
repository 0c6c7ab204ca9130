"""Models of ``transformers``, also with adapters of ``peft``, cut into stages as they are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from tests.reference import train_alone
from tests.transformers_models import of_gpt2, of_llama
from tests.worlds import run_world

TARGETS = {"Llama": ["q_proj", "v_proj"], "GPT2": ["c_attn"]}


def plain(kind: str) -> nn.Module:
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "GPT2":
        config = of_gpt2(width=8, layers=3)
        config.tie_word_embeddings = False
        return library.GPT2LMHeadModel(config).double()
    return library.LlamaForCausalLM(of_llama("Llama", width=8, layers=3)).double()


def wrapped(model: nn.Module, config: Any) -> nn.Module:
    with warnings.catch_warnings():
        # peft 0.21 reads a name that transformers 5.23 has deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return pytest.importorskip("peft").get_peft_model(model, config)


def adapted(kind: str, **options: Any) -> nn.Module:
    config = pytest.importorskip("peft").LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        target_modules=TARGETS[kind],
        fan_in_fan_out=kind == "GPT2",
        init_lora_weights=False,
        **options,
    )
    return wrapped(plain(kind), config)


def token_loss(output: Any, target: Tensor) -> Tensor:
    logits = output.logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def tokens(step: int) -> Tensor:
    return torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def in_one_process(start: nn.Module) -> dict[str, Tensor]:
    model = copy.deepcopy(start)
    optimizer = optimizer_of(model)
    return train_alone(
        model,
        optimizer,
        2,
        lambda step: [token_loss(model(input_ids=tokens(step)), tokens(step))],
    )


def in_stages(world: ec.World, start: nn.Module, shard: int) -> dict[str, Tensor]:
    model = copy.deepcopy(start)
    units = {"units": ec.units.by_type("LlamaDecoderLayer", "GPT2Block")} if shard > 1 else {}
    plan = ec.Plan(pp=world.size // shard, shard=shard, microbatches=2)
    pipe = ec.parallelize(model, plan, world, loss_fn=token_loss, **units)
    optimizer = optimizer_of(pipe)
    for step in range(2):
        batch = tokens(step)[world.rank % shard :: shard]
        pipe.step(batch, target=batch)
        optimizer.step()
        optimizer.zero_grad()
    return pipe.whole_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize("kind", TARGETS)
def test_lora_in_stages_has_the_weights_of_one_process(kind: str, shard: int):
    start = adapted(kind)
    expected = in_one_process(start)
    for found in run_world("threads", in_stages, 2 * shard, (start, shard)):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            # Llama norms in float32, whatever the dtype of the model.
            close = {"rtol": 0.0, "atol": 1e-12} if kind == "GPT2" else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(value, expected[name], **close)


@pytest.mark.slow
def test_a_head_that_is_saved_beside_the_adapters_is_trained():
    start = adapted("GPT2", modules_to_save=["lm_head"])
    expected = in_one_process(start)
    name = "base_model.model.lm_head.modules_to_save.default.weight"
    assert not torch.equal(start.state_dict()[name], expected[name])
    for found in run_world("threads", in_stages, 3, (start, 1)):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)


def test_stages_have_the_names_of_the_model_around():
    for model in (adapted("Llama"), adapted("Llama").base_model):
        parts = ec.pipeline.split(model, 3)
        names = {name for part in parts for name, _ in part.named_parameters()}
        assert names == {name for name, _ in model.named_parameters(remove_duplicate=False)}


def test_a_model_that_gets_a_prompt_is_not_taken_for_the_one_inside():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    parts = ec.pipeline.split(wrapped(plain("Llama"), config), 3)
    names = {name for part in parts for name, _ in part.named_parameters()}
    assert "prompt_encoder.default.embedding.weight" in names


# A mixture of experts ---------------------------------------------------------------------------

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral(**options: Any) -> nn.Module:
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return library.MixtralForCausalLM(
        library.MixtralConfig(**SIZES, **HEADS, **EXPERTS, use_cache=False, **options)
    )


def step_of_mixtral(world: ec.World, expected: dict[str, Tensor]) -> float:
    model = mixtral()
    model.load_state_dict({key: value for key, value in expected.items() if key[:5] != "grad "})
    tokens = torch.arange(32).view(4, 8)
    pipe = ec.Pipeline(ec.pipeline.split(model, 2), world.group, microbatches=2, loss_fn=token_loss)
    loss = pipe.step(tokens, target=tokens, loss_everywhere=True)
    for stage in pipe.stages.values():
        for name, param in stage.named_parameters():
            # Rows are added up in two microbatches, in float32.
            torch.testing.assert_close(param.grad, expected[f"grad {name}"], rtol=1e-4, atol=1e-6)
    return loss.item()


def test_mixtral_has_the_gradients_of_one_process():
    plain_model = mixtral()
    tokens = torch.arange(32).view(4, 8)
    loss = token_loss(plain_model(tokens), tokens)
    loss.backward()
    grads = {f"grad {name}": param.grad for name, param in plain_model.named_parameters()}
    found = run_world("threads", step_of_mixtral, 2, ({**plain_model.state_dict(), **grads},))
    assert found == pytest.approx([loss.item()] * 2, rel=1e-5)


def test_the_logits_of_all_routers_are_refused_by_name():
    model = mixtral(output_router_logits=True)
    with pytest.raises(ec.ArgumentError, match="output_router_logits = False"):
        ec.pipeline.split(model, 2)


# Families ---------------------------------------------------------------------------------------

FAMILY_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
OF_LLAMA = FAMILY_SIZES | {"num_key_value_heads": 1}
OF_HEADS = OF_LLAMA | {"head_dim": 8}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {key: value for key, value in FAMILY_SIZES.items() if key != "intermediate_size"}
OPT |= {"ffn_dim": 24, "word_embed_proj_dim": 8}
GPTJ = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
# By class: its configuration, and the sizes of a tiny one.
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "GemmaForCausalLM": ("GemmaConfig", OF_HEADS),
    "Gemma2ForCausalLM": ("Gemma2Config", OF_HEADS),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", OF_HEADS),
    "PhiForCausalLM": ("PhiConfig", FAMILY_SIZES),
    "Phi3ForCausalLM": ("Phi3Config", OF_LLAMA | SPECIAL_TOKENS),
    "OlmoForCausalLM": ("OlmoConfig", OF_LLAMA | SPECIAL_TOKENS),
    "Olmo2ForCausalLM": ("Olmo2Config", OF_LLAMA | SPECIAL_TOKENS),
    "OPTForCausalLM": ("OPTConfig", OPT),
    "Qwen2ForCausalLM": ("Qwen2Config", OF_LLAMA),
    "Qwen3ForCausalLM": ("Qwen3Config", OF_HEADS),
    "MistralForCausalLM": ("MistralConfig", OF_LLAMA),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", FAMILY_SIZES),
    "BloomForCausalLM": (
        "BloomConfig",
        {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    ),
    "FalconForCausalLM": ("FalconConfig", FAMILY_SIZES),
    "GPTJForCausalLM": ("GPTJConfig", GPTJ | {"rotary_dim": 4} | SPECIAL_TOKENS),
    "BertForMaskedLM": ("BertConfig", FAMILY_SIZES),
    "T5EncoderModel": (
        "T5Config",
        {"vocab_size": 32, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2},
    ),
}


def tiny(family: str) -> nn.Module:
    library = pytest.importorskip("transformers")
    name, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model: nn.Module = getattr(library, family)(getattr(library, name)(**sizes)).double().train()
    for module in model.modules():  # one process draws other random numbers
        for key, value in vars(module).items():
            if "drop" in key or key == "p":
                setattr(module, key, 0.0 if isinstance(value, float) else value)
    return model


def squared(output: Any, target: Tensor) -> Tensor:
    values = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return (values - target).square().mean()


def family_tokens() -> Tensor:
    return torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))


# OPT registers its last norm before its blocks.
SUFFIXES = {
    "OPTForCausalLM": ["model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"]
}


def in_two_stages(
    world: ec.World, start: nn.Module, suffix: list[str] | None
) -> tuple[Any, dict[str, Tensor]]:
    model = copy.deepcopy(start)
    stages = ec.pipeline.split(model, 2, suffix=suffix)
    pipe = ec.Pipeline(stages, world.group, microbatches=2, loss_fn=squared)
    loss = pipe.step(family_tokens(), target=torch.ones(4, 1, 1))
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    return loss, pipe.whole_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers_are_cut_by_their_order_of_registration(family: str) -> None:
    start = tiny(family)
    model = copy.deepcopy(start)
    expected = squared(model(family_tokens()), torch.ones(4, 1, 1))
    expected.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    results = run_world("threads", in_two_stages, 2, (start, SUFFIXES.get(family)))
    losses = [loss for loss, _ in results if loss is not None]
    # Norms and attention of some families compute in float32, over other rows than one process.
    torch.testing.assert_close(losses[0], expected.detach(), rtol=1e-6, atol=0)
    for _, state in results:
        assert state.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7, msg=name)
