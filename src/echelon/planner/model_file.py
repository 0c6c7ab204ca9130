"""Reads a ``Transformer`` from a file: our own sizes, or the configuration of a model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, fields
from itertools import chain
from pathlib import Path
from typing import Any, final

from echelon.checks import integer
from echelon.errors import ArgumentError
from echelon.planner.transformer import Transformer
from echelon.process.plain_file import read_plain

# Families whose blocks have two matrices in the feed-forward part, and those that have three.
_TWO = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "mpt", "phi", "falcon", "starcoder2")
_THREE = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "phi3", "olmo", "olmo2", "granite", "smollm3", "stablelm", "cohere", "yi",
)  # fmt: skip
_WITH_BIASES = ("gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "phi", "starcoder2")
_WITH_POSITIONS = ("gpt2", "gpt_neo", "opt")
# Our name of a size, and the names that configurations have for it.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
}
# Fields with which a model of a known family has parts that ``Transformer`` does not describe, and
# a value with which it has none.
_NOT_DESCRIBED = {
    "add_cross_attention": False,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 0,
    "mlp_only_layers": [],
    "n_shared_experts": 0,
    "num_shared_experts": 0,
    "q_lora_rank": 0,
    "quantization_config": {},
    "shared_expert_intermediate_size": 0,
    "text_config": {},
    "vision_config": {},
}
# Fields that change neither sizes nor times, by name or by a part of it. All others are read,
# refused above, or said: a plan would silently be that of a model without them.
_FREE = frozenset({
    "_name_or_path", "architectures", "attention_multiplier", "attn_logit_softcapping", "auto_map",
    "bos_token_id", "chunk_size_feed_forward", "do_layer_norm_before", "embedding_multiplier",
    "eos_token_id", "final_logit_softcapping", "finetuning_task", "id2label", "init_device",
    "is_decoder", "is_encoder_decoder", "label2id", "layer_norm_elementwise_affine",
    "learned_pos_emb", "logit_scale", "logits_scaling", "max_window_layers", "model_type",
    "no_bias",
    "no_rope_layer_interval", "no_rope_layers", "norm_topk_prob", "norm_type",
    "original_max_position_embeddings", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "parallel_attn", "partial_rotary_factor",
    "pretraining_tp", "problem_type", "query_pre_attn_scalar", "residual_multiplier",
    "return_dict", "rotary_dim", "rotary_pct", "router_aux_loss_coef", "scale_attn_weights",
    "sep_token_id", "torchscript", "transformers_version", "use_cache", "use_parallel_residual",
})  # fmt: skip
_FREE_PARTS = ("activation", "hidden_act", "dropout", "pdrop", "init_std", "initializer_range",
               "norm_eps", "rope", "summary_")  # fmt: skip
_MAX_NBYTES = 1 << 24
# What a file of weights is in says how they are kept; others compute at rates that are not known.
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_PRICED_DTYPES = ("auto", "bfloat16", "float16", "float32")
_WINDOWS = ("sliding_window", "window_size")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")


def read_transformer(path: Path, seq: int | None = None) -> Transformer:
    """The model of a file.

    Args:
        path: JSON with the fields of ``Transformer``, or with the configuration of a model of
            ``transformers``, or a folder that has the latter as ``config.json``.
        seq: tokens of a sequence; None: as many as the file says.

    Raises:
        ArgumentError: the file cannot be read, or does not say all sizes.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        value = json.loads(read_plain(file, _MAX_NBYTES, follows=True))
    except OSError as error:
        raise ArgumentError(f"model {str(file)!r:.200} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"model {str(file)!r:.200} is no JSON ({error}): give one with the sizes of a model, a "
            "config.json of transformers, or its folder"
        ) from error
    if not isinstance(value, Mapping):
        raise ArgumentError(f"model {str(file)!r:.200} must be an object of JSON")
    return transformer_of(value, str(file), seq)


def transformer_of(value: Mapping[str, Any], name: str, seq: int | None = None) -> Transformer:
    """The model of the fields of ``Transformer``, or of a configuration of ``transformers``.

    Args:
        name: of the model, for errors.
        seq: tokens of a sequence; None: as many as the value says.

    Raises:
        ArgumentError: a size is missing, wrong or not known, or a field changes the model in a way
            that sizes do not say.
    """
    if "model_type" not in value:
        sizes = _of_fields(value, name)
    else:  # a family without positions does not say how long a sequence is
        without = seq is not None and not any(field in value for field in _NAMES["seq"])
        config = _ReadFields({**value, "n_ctx": seq} if without else value)
        sizes = _of_config(config, name)
        _say_unpriced(config, name, seq or sizes["seq"])
    if seq is not None:
        sizes["seq"] = seq
    return Transformer(**sizes)


@final
class _ReadFields(dict[str, Any]):
    """The fields of a configuration; it knows those that were looked at."""

    def __init__(self, fields_given: Mapping[str, Any]) -> None:
        super().__init__(fields_given)
        self.looked_at: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.looked_at.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.looked_at.add(name)
        return super().get(name, default)


def _say_unpriced(config: _ReadFields, file: str, seq: int) -> None:
    """Warn of fields that nobody has read, and that may change sizes or times."""
    looked_at = {*config.looked_at, *chain(*_NAMES.values()), *_INNER, *_DTYPE_FIELDS}
    unread = {
        name: value
        for name, value in config.items()
        if (value is True or value not in (None, False, 0, 1, "", [], {}))
        and name not in looked_at | _FREE
        and not any(part in name for part in _FREE_PARTS)
        and not (name in _WINDOWS and isinstance(value, int) and value >= seq)
        and not (name.endswith("bias") and config["model_type"] in _WITH_BIASES)
        and not (name == "layer_types" and {*config[name]} == {"full_attention"})
    }
    if unread:
        text = ", ".join(f"{name} = {value!r:.40}" for name, value in [*unread.items()][:6])
        more = f" and {len(unread) - 6} more" if len(unread) > 6 else ""
        warnings.warn(
            f"model {file!r:.200} has {text}{more}, which plans do not price: they are those of a "
            "model without it. A window of attention, for example, is priced as all of it",
            stacklevel=4,
        )


def _of_fields(value: Mapping[str, Any], file: str) -> dict[str, Any]:
    known = {field.name for field in fields(Transformer)}
    needed = {field.name for field in fields(Transformer) if field.default is MISSING}
    unknown, missing = sorted(set(value) - known), sorted(needed - set(value))
    if unknown or missing:
        wrong = f"has {unknown[0]!r}" if unknown else f"has no {missing[0]!r}"
        raise ArgumentError(
            f"model {file!r:.200} {wrong}: give the fields {', '.join(sorted(known))}, or the "
            "configuration of a model, which has 'model_type'"
        )
    return dict(value)


def _of_config(config: Mapping[str, Any], file: str) -> dict[str, Any]:
    family = config["model_type"]
    if family not in (*_TWO, *_THREE):
        raise ArgumentError(
            f"model {file!r:.200} is of the family {family!r:.40}, which is not known: write the "
            f"fields {', '.join(field.name for field in fields(Transformer))} into a JSON file, or "
            "give ec.plan a module and an example of its batch"
        )
    for field in _DTYPE_FIELDS:
        dtype = str(config.get(field) or "auto").removeprefix("torch.")
        if dtype not in _PRICED_DTYPES:
            raise ArgumentError(
                f"model {file!r:.200} has {field} = {dtype!r:.40}, and plans are priced with the "
                "rates of 16 bits: leave the field out to plan the model in these"
            )
    for field, without in _NOT_DESCRIBED.items():
        if config.get(field) and config[field] != without:
            raise ArgumentError(
                f"model {file!r:.200} has {field} = {config[field]!r:.80}, which sizes do not "
                "say: leave the field out to plan the model without it"
            )
    sizes = {name: _first(config, names, file) for name, names in _NAMES.items()}
    hidden, heads = sizes["hidden"], integer("the number of heads", sizes["heads"], low=1)
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    integer("the number of experts", experts, low=1)
    inner = next((config[name] for name in _INNER if config.get(name)), 4 * hidden)
    projected = config.get("word_embed_proj_dim") or hidden
    if projected != hidden:
        raise ArgumentError(
            f"model {file!r:.200} has word_embed_proj_dim = {projected!r:.80}, which sizes do not "
            "say unless it is hidden_size"
        )
    return {
        **sizes,
        "kv_heads": _kv_heads(config, heads),
        "head_dim": config.get("head_dim") or hidden // heads,
        "ffn": config.get("moe_intermediate_size", inner) if experts > 1 else inner,
        "gated": family in _THREE,
        "tied": config.get("tie_word_embeddings", family in ("gpt2", "gemma", "gemma2")),
        "positions": sizes["seq"] if family in _WITH_POSITIONS else 0,
        "biases": family in _WITH_BIASES,
        "experts": experts,
        "active_experts": config.get("num_experts_per_tok", 1) if experts > 1 else 1,
    }


def _first(config: Mapping[str, Any], names: tuple[str, ...], file: str) -> int:
    for name in names:
        if isinstance(config.get(name), int) and not isinstance(config[name], bool):
            return int(config[name])
    how = ": give seq, the tokens of a sequence" if names == _NAMES["seq"] else ""
    raise ArgumentError(f"model {file!r:.200} does not say {names[0]}{how}")


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config["model_type"] == "falcon" and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else heads
    return config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
