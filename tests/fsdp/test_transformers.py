"""Models of the ``transformers`` library, small and random, trained as one process trains them.

Nothing is downloaded. The library takes seconds to import, so it is imported when a test runs, and
each kind of world is started once for all models.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests import reference
from tests.reference import assert_states_close
from tests.transformers_models import VOCABULARY, of_gpt2, of_llama
from tests.worlds import run_world

RANKS, STEPS = 2, 3


def llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(of_llama("Llama", width=16, layers=2))


def gpt2() -> nn.Module:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(of_gpt2(width=16, layers=2))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


# How each is built, the class of its layers, and how many it has.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "llama": (llama, "LlamaDecoderLayer", 2),
    "gpt2": (gpt2, "GPT2Block", 2),
    "t5": (t5, "T5Block", 4),
}


class Case(NamedTuple):
    model: str
    layout: str
    recomputes: bool


CASES = [Case(m, layout, r) for m in MODELS for layout in ("flat", "rows") for r in (False, True)]


@cache
def built(name: str) -> nn.Module:
    """One model for all: the library changes torch's global state while it builds one."""
    torch.manual_seed(0)
    return MODELS[name][0]().double().train()


def batch(name: str, step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(1, VOCABULARY, (2, 6), generator=generator)
    return {"input_ids": tokens, "labels": tokens.flip(1) if name == "t5" else tokens}


def loss_of(model: nn.Module, one: dict[str, Tensor]) -> Tensor:
    """The model's own loss, if it is float64; that of the others is computed in float32."""
    output = model(**one)
    if output.loss.dtype == torch.float64:
        return output.loss
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), one["labels"][:, 1:].flatten())


def train(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return reference.train(optimizer, len(batches), lambda step: [loss_of(model, batches[step])])


@cache
def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """One process on the batches of all ranks together."""
    model = copy.deepcopy(built(name))
    parts = [[batch(name, step, rank) for rank in range(RANKS)] for step in range(STEPS)]
    whole = [{key: torch.cat([one[key] for one in part]) for key in part[0]} for part in parts]
    return train(model, whole), model.state_dict()


def sharded(world: World, plain_model: nn.Module, case: Case) -> ec.FSDP:
    model = copy.deepcopy(plain_model)
    if case.recomputes:
        model.activation_checkpointing_enable({"use_reentrant": False})
    layer = ec.units.by_type(MODELS[case.model][1])
    wrapped = ec.FSDP(model, world.group, units=layer, layout=case.layout, min_num_params=0)
    assert len(wrapped.units) == 1 + MODELS[case.model][2]
    return wrapped


def train_all(world: World, models: dict[str, nn.Module]) -> dict[Case, Any]:
    found = {}
    for case in CASES:
        model = sharded(world, models[case.model], case)
        losses = train(model, [batch(case.model, step, world.rank) for step in range(STEPS)])
        found[case] = losses, model.state_dict()
    return found


@cache
def trained(kind: str) -> list[dict[Case, Any]]:
    return run_world(kind, train_all, RANKS, [{name: built(name) for name in MODELS}])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.model}-{c.layout}{'-recomputed' if c.recomputes else ''}"
)
def test_training_equals_one_process_on_the_concatenated_batch(kind: str, case: Case) -> None:
    losses, state = plain(case.model)
    found = [one[case] for one in trained(kind)]
    for step in range(STEPS):
        mean = sum(one[0][step] for one in found) / RANKS
        assert mean == pytest.approx(losses[step], rel=1e-12)
    for _, whole in found:
        assert list(whole) == list(state)
        # Sums over ranks have another order; AdamW divides them by their own size.
        assert_states_close(whole, state, rtol=1e-9, atol=1e-10)


def generates(world: World, plain_model: nn.Module) -> Tensor:
    model = sharded(world, plain_model, Case("llama", "flat", False)).eval()
    prompt = batch("llama", 0, 0)["input_ids"]
    with model.full_parameters(), torch.no_grad():
        return model.generate(prompt, max_new_tokens=4, do_sample=False)


@pytest.mark.slow
def test_text_is_generated_inside_full_parameters() -> None:
    prompt = batch("llama", 0, 0)["input_ids"]
    expected = copy.deepcopy(built("llama")).eval().generate(prompt, max_new_tokens=4)
    for found in run_world("threads", generates, RANKS, [built("llama")]):
        assert torch.equal(found, expected)
