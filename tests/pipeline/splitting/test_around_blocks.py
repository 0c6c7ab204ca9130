"""What runs before a list of blocks and what after it is known without being told."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.pipeline.splitting.around_blocks import names_around
from tests.worlds import run_world


class Decoder(nn.Module):
    """Registers its modules in an order that is not that of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.embed = nn.Embedding(8, 4)
        self.unused = nn.Linear(1, 1)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.dropout = nn.Dropout(0.0)
        self.late = nn.Linear(4, 4)
        self.rotary = Table()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.embed(tokens)) + self.rotary(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return sum([self.norm(hidden), self.late(hidden)])


class Table(nn.Module):
    """A buffer that is not saved, as tables of positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.angles * tokens.shape[1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_before = nn.Linear(4, 2)
        self.decoder = Decoder()
        self.statistics = nn.BatchNorm1d(2, affine=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.statistics(self.head_before(self.decoder(tokens)).flatten(1)[:, :2])


def test_names_are_on_the_side_on_which_the_code_uses_them() -> None:
    around = names_around(Model(), "decoder.blocks")
    assert around.before == ["decoder.embed", "decoder.unused", "decoder.dropout", "decoder.rotary"]
    assert around.after == ["decoder.norm", "decoder.late", "head_before", "statistics"]
    # Statistics are saved, so that only one stage may have them.
    assert around.tables == {"decoder.rotary"}


def test_a_name_that_code_uses_on_both_sides_stays_where_it_is_registered() -> None:
    class Tied(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.norm(self.embed(tokens))
            for block in self.blocks:
                hidden = block(hidden)
            return self.norm(hidden) @ self.embed.weight.T

    around = names_around(Tied(), "blocks")
    assert around.before == ["norm", "embed", "unused"]
    assert around.after == ["dropout", "late", "rotary"]


def test_what_is_called_on_what_another_call_gives_comes_after_it() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.decoder, self.head = nn.Embedding(8, 4), Decoder(), nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(input=self.decoder(self.embed(tokens)))

    around = names_around(Nested(), "decoder.blocks")
    assert around.before[0] == "embed"
    assert around.after[-1] == "head"


def test_a_forward_without_source_leaves_names_where_they_are_registered() -> None:
    names: dict[str, Any] = {}
    exec("def forward(self, tokens): return self.norm(self.blocks(tokens))", names)
    typed: type[Decoder] = type("Typed", (Decoder,), {"forward": names["forward"]})
    around = names_around(typed(), "blocks")
    assert around.before == ["norm", "embed", "unused"]


# --- the families of transformers ----------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
LLAMA = SIZES | {"num_key_value_heads": 1}
HEAD = LLAMA | {"head_dim": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {key: value for key, value in SIZES.items() if key != "intermediate_size"} | {"ffn_dim": 24}
GPTJ = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
# By class: its configuration, and the sizes of a tiny one.
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "GemmaForCausalLM": ("GemmaConfig", HEAD),
    "Gemma2ForCausalLM": ("Gemma2Config", HEAD),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", HEAD),
    "PhiForCausalLM": ("PhiConfig", SIZES),
    "Phi3ForCausalLM": ("Phi3Config", LLAMA | SPECIAL),
    "OlmoForCausalLM": ("OlmoConfig", LLAMA | SPECIAL),
    "Olmo2ForCausalLM": ("Olmo2Config", LLAMA | SPECIAL),
    "OPTForCausalLM": ("OPTConfig", OPT | {"word_embed_proj_dim": 8}),
    "Qwen2ForCausalLM": ("Qwen2Config", LLAMA),
    "Qwen3ForCausalLM": ("Qwen3Config", HEAD),
    "MistralForCausalLM": ("MistralConfig", LLAMA),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SIZES),
    "BloomForCausalLM": (
        "BloomConfig",
        {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    ),
    "FalconForCausalLM": ("FalconConfig", SIZES),
    "GPTJForCausalLM": ("GPTJConfig", GPTJ | {"rotary_dim": 4} | SPECIAL),
    "BertForMaskedLM": ("BertConfig", SIZES),
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


def tokens() -> Tensor:
    return torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))


def in_two_stages(world: ec.World, start: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    model = copy.deepcopy(start)
    pipe = ec.Pipeline(ec.pipeline.split(model, 2), world.group, microbatches=2, loss_fn=squared)
    loss = pipe.step(tokens(), target=torch.ones(4, 1, 1))
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    return loss, pipe.whole_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers_are_cut_without_being_told_how(family: str) -> None:
    start = tiny(family)
    model = copy.deepcopy(start)
    expected = squared(model(tokens()), torch.ones(4, 1, 1))
    expected.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    results = run_world("threads", in_two_stages, 2, (start,))
    losses = [loss for loss, _ in results if loss is not None]
    # Norms and attention of some families compute in float32, over other rows than one process.
    torch.testing.assert_close(losses[0], expected.detach(), rtol=1e-6, atol=0)
    for _, state in results:
        assert state.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7, msg=name)
