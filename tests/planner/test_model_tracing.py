"""A traced model computes and keeps what the formulas of its architecture say, without them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import echelon as ec
from echelon.errors import ArgumentError, UnsupportedError
from echelon.planner.layout import Layout, Recompute
from echelon.planner.model_tracing import trace_model
from echelon.planner.operations import block_work, head_work
from echelon.planner.software_stack import SoftwareStack, rates_of
from echelon.planner.step_memory import block_activations, step_memory
from echelon.planner.traced_model import TracedModel
from echelon.planner.transformer import Transformer
from tests.planner.sizes import RATES, STACK

SEQ, VOCABULARY, WIDTH, INNER, HEADS, LAYERS = 64, 512, 128, 384, 4, 3
SIZES: dict[str, Any] = {
    "layers": LAYERS,
    "hidden": WIDTH,
    "heads": HEADS,
    "head_dim": WIDTH // HEADS,
    "vocab": VOCABULARY,
    "seq": SEQ,
}
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], Transformer]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_inner": INNER,
            "n_positions": SEQ,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
        Transformer(
            **SIZES, kv_heads=HEADS, ffn=INNER, gated=False, tied=True, positions=SEQ, biases=True
        ),
    ),
    "llama": (
        "LlamaForCausalLM",
        LLAMA,
        Transformer(**SIZES, kv_heads=2, ffn=INNER, gated=True, tied=False),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        Transformer(
            **SIZES, kv_heads=2, ffn=INNER, gated=True, tied=False, experts=4, active_experts=2
        ),
    ),
}


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


def traced(family: str, **options: Any) -> tuple[TracedModel, Transformer]:
    library = pytest.importorskip("transformers")
    kind, config, sizes = FAMILIES[family]
    cls = getattr(library, kind)
    with torch.device("meta"):
        model = cls(cls.config_class(**config, bos_token_id=None, eos_token_id=None))
    tokens = torch.zeros(4, SEQ, dtype=torch.long)
    return trace_model(model, tokens, tokens, next_token_loss, **options), sizes


def flops(work: Any) -> float:
    return sum(product.flops for product in work.multiplications)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the library, about its own configurations
@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_parameters_and_operations_of_their_formulas(family: str) -> None:
    model, sizes = traced(family)
    assert model.num_parameters == sizes.num_parameters
    assert model.block_parameters == sizes.block_parameters
    assert model.embedding_parameters == sizes.embedding_parameters
    assert model.head_parameters == sizes.head_parameters
    assert (model.layers, model.hidden, model.vocab) == (LAYERS, WIDTH, VOCABULARY)
    assert model.tied == sizes.tied
    for microbatch in (1, 3):
        layout = Layout(microbatch=microbatch)
        router = 2 * microbatch * SEQ * WIDTH * sizes.experts * (sizes.experts > 1)
        for factor, counted, formula in zip(
            (1, 2),
            block_work(model, layout, STACK),
            block_work(sizes, layout, STACK),
            strict=True,
        ):
            assert flops(counted) == pytest.approx(flops(formula) + factor * router)
            assert counted.attention_flops == pytest.approx(formula.attention_flops)
        counted_head = head_work(model, layout, RATES)
        assert flops(counted_head) == pytest.approx(flops(head_work(sizes, layout, RATES)))


# What a block keeps besides the formula, in units of the residual stream. The statistics of norms,
# and of attention one number for each head and position, are in all of them.
STREAM, INNER_WIDTHS, STATISTICS = 2 * SEQ * WIDTH, INNER / WIDTH, 0.1
BESIDES = {
    # The activation function is computed in steps, three of which keep their input; outputs of
    # attention and of its projection are kept before and after they are put in another order.
    "gpt2": 2 + 3 * INNER_WIDTHS,
    # Each norm computes in float32, which is twice as long, and keeps what it normalised besides
    # what it gives.
    "llama": 4,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", BESIDES)
def test_a_block_keeps_what_the_formula_says_and_what_the_library_adds(family: str) -> None:
    model, sizes = traced(family)
    traced_bytes = sum(model.once.blocks[1].kept)
    formula = block_activations(sizes, Layout(), STACK)
    besides = (traced_bytes - formula) / STREAM
    assert BESIDES[family] <= besides <= BESIDES[family] + STATISTICS


def stack_of_layers(count: int, width: int = 300) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def test_a_plain_stack_of_layers_is_counted_by_hand() -> None:
    model = trace_model(stack_of_layers(4), torch.zeros(9, 300), rounding=512)
    layout = Layout(microbatch=3)
    assert [part.output for part in model.once.blocks] == [300.0] * 4
    assert block_work(model, layout, STACK).forward.multiplications == ((3, 300, 300),)
    # Each layer keeps its input of 3 x 300 elements of 2 bytes.
    assert block_activations(model, layout, STACK) == 2048
    assert block_activations(model, layout, STACK, Recompute.BLOCKS) == 2048


def test_the_model_is_left_as_it_was() -> None:
    model = stack_of_layers(2)
    trace_model(model, torch.zeros(2, 300))
    assert next(model.parameters()).dtype == torch.float32
    assert all(param.grad is None for param in model.parameters())
    assert not model[0]._forward_hooks


def test_a_model_that_cannot_be_cut_is_one_block() -> None:
    model = trace_model(nn.Linear(300, 200), torch.zeros(2, 300), dtype=None)
    assert (model.layers, model.block_parameters, model.width) == (1, 300 * 200 + 200, 4)
    assert flops(head_work(model, Layout(), RATES)) == 0


def test_what_cannot_be_traced_is_refused_with_a_sentence() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(300, 300)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[x.sum(2) > 0])

    with pytest.raises(UnsupportedError, match="values of a large tensor"):
        trace_model(Routed(), torch.zeros(2, 300, 300))
    with pytest.raises(ArgumentError, match="no tensor with a row for each sequence"):
        trace_model(stack_of_layers(2), 3)
    frozen = stack_of_layers(2).requires_grad_(False)
    with pytest.raises(ArgumentError, match="no output of the model has a gradient"):
        trace_model(frozen, torch.zeros(2, 300))


def test_parameters_that_are_frozen_have_neither_gradients_nor_an_optimizer() -> None:
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(4)))
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    traced = trace_model(model, torch.zeros(8, 300))
    stack = SoftwareStack(name="fsdp", rates=rates_of("fsdp"))
    memory = step_memory(traced, Layout(), stack)
    assert traced.trained_share == 0.25
    assert memory.parameters == 2 * 4 * 90_000
    assert memory.gradients == stack.gradient_bytes * 90_000
    assert memory.optimizer == 12 * 90_000


def test_the_multiplications_of_a_recurrent_layer_are_counted() -> None:
    traced = trace_model(nn.LSTM(64, 64, batch_first=True), torch.zeros(4, 10, 64))
    forward = 10 * 2 * 2 * 64 * 4 * 64  # of inputs and of states, for each of 10 tokens
    assert traced.flops() == pytest.approx(3 * forward, rel=0.25)  # the input has no gradient
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize(
    ("model", "example", "sentence"),
    [
        (nn.Linear(8, 8), torch.zeros(4, 9), "Linear cannot run with one sequence of its example"),
        (nn.Linear(8, 8), {"x": torch.zeros(4, 8)}, "Linear cannot run with one sequence"),
        (nn.BatchNorm1d(8), torch.zeros(4, 8), "more than 1 value per channel"),
        (nn.Linear(8, 8), torch.zeros(0, 8), "no tensor with a row for each sequence"),
        (nn.LazyLinear(8), torch.zeros(4, 8), "'weight' has no shape before the first forward"),
    ],
)
def test_a_model_that_cannot_run_gets_a_sentence(
    model: nn.Module, example: Any, sentence: str
) -> None:
    with pytest.raises(ec.ArgumentError, match=sentence):
        trace_model(model, example)
    assert torch._C._len_torch_dispatch_stack() == 0
