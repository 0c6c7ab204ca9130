"""What each rank keeps of models of ``transformers``, to the byte, with every kind of plan.

The configurations are odd on purpose: widths that three ranks do not divide, heads on shared keys
and values, tied heads, experts, norms and biases here and there.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.planner.dry_run import DryRunOptions, dry_run

VOCABULARY, LENGTH = 97, 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    "intermediate_size": 28,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
GROUPED = {**SIZES, "num_key_value_heads": 1}
ROTATED = {**GROUPED, "hidden_size": 24, "num_attention_heads": 3}
OLDER = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 3, "n_head": 2, "n_positions": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**OLDER, **NO_TOKENS}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 20,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 24,
            **NO_TOKENS,
        },
    ),
    "gptj": ("GPTJForCausalLM", {**OLDER, "rotary_dim": 4, **NO_TOKENS}),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama, tied": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", GROUPED),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 3}),
    "qwen2": ("Qwen2ForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            **GROUPED,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}),
    "phi": ("PhiForCausalLM", ROTATED),
    "phi3": ("Phi3ForCausalLM", SIZES),
    "opt": (
        "OPTForCausalLM",
        {**SIZES, "word_embed_proj_dim": 12, "ffn_dim": 28, "pad_token_id": 1},
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 20, "n_layer": 3, "n_head": 2, **NO_TOKENS},
    ),
    "falcon": ("FalconForCausalLM", SIZES),
    "olmo": ("OlmoForCausalLM", SIZES),
    "olmo2": ("Olmo2ForCausalLM", SIZES),
    "stablelm": ("StableLmForCausalLM", ROTATED),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 24, "n_layers": 3, "n_heads": 2, "max_seq_len": 24},
    ),
    "bert": ("BertForMaskedLM", SIZES),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 20, "d_kv": 8, "d_ff": 28, "num_layers": 2},
    ),
}
# Registered before the blocks, and used after them.
SUFFIXES = {"opt": ["model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"]}
NOT_CUT = {"t5"}  # an encoder and a decoder of equal length: `split` asks for the layers in order


def build(name: str) -> nn.Module:
    library = pytest.importorskip("transformers")
    kind, sizes = MODELS[name]
    cls = getattr(library, kind)
    torch.manual_seed(0)
    model: nn.Module = cls(cls.config_class(**sizes))
    return model


def planned(name: str, plan: ec.Plan) -> nn.Module | list[nn.Module]:
    """What ``ec.parallelize`` takes: the model, or its stages where the cut needs a word."""
    model = build(name)
    if plan.pp == 1 or name not in SUFFIXES:
        return model
    return list(ec.pipeline.split(model, plan.pp, suffix=SUFFIXES[name]))


def inputs(name: str) -> Any:
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    return (tokens, torch.ones_like(tokens), tokens) if name == "t5" else tokens


def mean_loss(output: Any, target: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return logits.float().pow(2).mean()


@cache
def by_block(name: str) -> Any:
    """FSDP's units: the blocks of the first list."""
    lists = [item for item in build(name).modules() if isinstance(item, nn.ModuleList)]
    return ec.units.by_type(type(next(item[0] for item in lists if len(item) > 1)).__name__)


def kept(world: ec.World, name: str, plan: ec.Plan, units: Any) -> tuple[int, int]:
    """Elements and bytes of the parameters of this rank."""
    loss_fn = mean_loss if plan.pp > 1 else None
    params = list(
        ec.parallelize(planned(name, plan), plan, world, units=units, loss_fn=loss_fn).parameters()
    )
    parts = [ec.local_shard(param) for param in params]
    return sum(part.numel() for part in parts), sum(part.nbytes for part in parts)


PLANS = [
    ec.Plan(dp=2),
    ec.Plan(shard=3),  # three ranks divide few of the sizes
    *(
        ec.Plan(shard=2, strategy=strategy)
        for strategy in (
            ec.Strategy.SHARD_GRAD_OP,
            ec.Strategy.SHARD_OPTIMIZER,
            ec.Strategy.NO_SHARD,
        )
    ),
    ec.Plan(dp=2, shard=2),
    ec.Plan(pp=2, microbatches=2),
    ec.Plan(pp=2, shard=2, microbatches=2),
]
# The others differ in how often a parameter is kept, which no model has a part in.
CUTTING = [ec.Plan(shard=3), ec.Plan(pp=2, shard=2, microbatches=2)]
WITH_EVERY_PLAN = {"gpt2", "qwen2_moe"}


def check(name: str, plan: ec.Plan) -> None:
    """Compare every rank of the plan with that of the real wrappers."""
    units = by_block(name) if plan.shard > 1 else None
    real = ec.run(kept, plan.num_ranks, args=(name, plan, units))
    for data_rank in range(plan.data_size):
        # The real ranks share memory, where nothing is sent and no part is padded.
        options = DryRunOptions(units=units, data_rank=data_rank, shares_memory=True)
        target = torch.zeros(2, LENGTH)
        steps = dry_run(planned(name, plan), plan, inputs(name), target, mean_loss, options)
        for step in steps:
            rank = step.stage * plan.data_size + data_rank
            assert (step.num_parameters, step.parameter_bytes) == real[rank], (str(plan), rank)


@pytest.mark.slow
@pytest.mark.timeout(400)  # many plans of models whose import alone takes seconds
@pytest.mark.filterwarnings("ignore")  # of the library, about its own configurations
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_of_a_plan_keeps_what_the_wrappers_keep(name: str) -> None:
    for plan in PLANS if name in WITH_EVERY_PLAN else CUTTING:
        if plan.pp == 1 or name not in NOT_CUT:
            check(name, plan)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_rank_of_a_tied_model_in_stages_keeps_what_the_wrappers_keep() -> None:
    check("llama, tied", ec.Plan(pp=2, shard=2, microbatches=2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(NOT_CUT))
def test_what_is_not_cut_says_so(name: str) -> None:
    with pytest.raises(ec.ArgumentError, match="pipeline_layers"):
        ec.pipeline.split(build(name), 2)
