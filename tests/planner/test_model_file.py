import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import echelon as ec
from echelon.planner.model_file import read_transformer, transformer_of

SMALL = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    "mistral": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gemma": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    "mixtral": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    "olmo2": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
}
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 32,
}  # fmt: skip
FIELDS = {
    "layers": 2, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 16, "gated": True,
    "vocab": 10, "seq": 4, "tied": False,
}  # fmt: skip


def write(folder: Path, value: Any) -> Path:
    path = folder / "config.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.filterwarnings("ignore:.* do not price")
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma", "mixtral"])
def test_the_parameters_of_a_configuration_are_those_of_its_model(
    family: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(family, vocab_size=100, **SMALL[family])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(param.numel() for param in model.parameters())
    assert read_transformer(tmp_path).num_parameters == expected


def test_fields_without_parts_that_sizes_do_not_say_are_harmless(tmp_path: Path) -> None:
    harmless = {"decoder_sparse_step": 1, "mlp_only_layers": [], "q_lora_rank": None}
    assert read_transformer(write(tmp_path, {**LLAMA, **harmless})).layers == 2


def test_a_size_that_is_no_number_is_not_said(tmp_path: Path) -> None:
    with pytest.raises(ec.ArgumentError, match="does not say num_hidden_layers"):
        read_transformer(write(tmp_path, {**LLAMA, "num_hidden_layers": True}))


def test_our_own_fields_are_taken_as_they_are(tmp_path: Path) -> None:
    model = read_transformer(write(tmp_path, FIELDS), seq=128)
    assert (model.layers, model.ffn, model.seq) == (2, 16, 128)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("{", "is no JSON"),
        ("[]", "must be an object of JSON"),
        ({**FIELDS, "depth": 3}, "has 'depth': give the fields"),
        ({"layers": 2}, "has no 'ffn'"),
        ({"model_type": "resnet"}, "family 'resnet', which .* give ec.plan a module"),
        ({"model_type": "llama", "hidden_size": 8}, "does not say num_hidden_layers"),
        ({**FIELDS, "heads": 0}, "heads is 0"),
        ({**LLAMA, "num_attention_heads": 0}, "the number of heads is 0"),
        ({**LLAMA, "num_experts": "8"}, "the number of experts is '8'"),
        ({**LLAMA, "n_shared_experts": 1}, "n_shared_experts = 1, which sizes do not say: leave"),
        ({**LLAMA, "mlp_only_layers": [0]}, "mlp_only_layers = .0., which sizes do not say"),
        ({**LLAMA, "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, "torch_dtype = .float8_e4m3fn., and plans are"),
    ],
)
def test_what_is_wrong_is_said(value: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ec.ArgumentError, match=sentence):
        read_transformer(write(tmp_path, value))


BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
FALCON = {
    "model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 100, "max_position_embeddings": 32,
}  # fmt: skip


def test_a_family_without_positions_takes_the_length_that_is_given(tmp_path: Path) -> None:
    path = write(tmp_path, BLOOM)
    with pytest.raises(ec.ArgumentError, match="give seq, the tokens of a sequence"):
        read_transformer(path)
    assert read_transformer(path, seq=128).seq == 128


@pytest.mark.filterwarnings("ignore:.* do not price")
def test_heads_have_the_name_of_each_family(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "gpt_neo", hidden_size=64, num_layers=2, num_heads=4, vocab_size=100,
        attention_types=[[["global", "local"], 1]],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert read_transformer(tmp_path).heads == 4


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({}, 1),
        ({"multi_query": False}, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
    ],
)
def test_keys_and_values_of_a_falcon_are_those_of_its_architecture(
    fields: dict[str, Any], kv_heads: int, tmp_path: Path
) -> None:
    assert read_transformer(write(tmp_path, {**FALCON, **fields})).kv_heads == kv_heads


@pytest.mark.parametrize(
    "field", [{"add_cross_attention": True}, {"word_embed_proj_dim": 32}], ids=str
)
def test_parts_that_sizes_do_not_say_are_refused(field: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ec.ArgumentError, match=f"{next(iter(field))} = .*which sizes do not say"):
        read_transformer(write(tmp_path, {**LLAMA, **field}))


def test_a_file_that_is_nested_too_deeply_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(ec.ArgumentError, match="is no JSON"):
        read_transformer(write(tmp_path, "[" * 100_000))


@pytest.mark.parametrize(
    ("field", "value"),
    [("sliding_window", 128), ("num_nextn_predict_layers", 3), ("use_bias", True),
     ("something_new", {"rank": 4})],
)  # fmt: skip
def test_a_field_that_nobody_reads_is_said(field: str, value: object) -> None:
    config = {**LLAMA_FIELDS, field: value}
    with pytest.warns(UserWarning, match=rf"{field} = .* do not price"):
        transformer_of(config, "m")


@pytest.mark.parametrize(
    ("field", "value"),
    [("sliding_window", 4096), ("attention_dropout", 0.1), ("rope_theta", 1e4), ("use_cache", True),
     ("layer_types", ["full_attention"] * 4), ("num_nextn_predict_layers", 0)],
)  # fmt: skip
def test_a_field_that_costs_nothing_is_not_said(field: str, value: object) -> None:
    transformer_of({**LLAMA_FIELDS, field: value}, "m")


LLAMA_FIELDS = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "vocab_size": 256, "max_position_embeddings": 256, "intermediate_size": 128,
}  # fmt: skip
