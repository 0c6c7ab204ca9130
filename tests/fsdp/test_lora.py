"""LoRA as ``peft`` applies it: a frozen model with small trainable matrices, sharded by block.

Models are made once, outside of ranks, and each rank has a copy. Two ranks add two gradients, in
either order the same sum: so one process gives the same bits, and so does every world.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests import reference
from tests.fsdp.models import PLAIN, has_effect
from tests.fsdp.test_transformers import MODELS, batch
from tests.reference import assert_states_close, assert_states_equal
from tests.worlds import KINDS, run_world

STEPS = 2
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn"], "t5": ["q", "v", "wo"]}
RECOMPUTED = (None, "plain", "reentrant")


class Case(NamedTuple):
    """A model, the dtype of what is frozen, which activations are kept, and what is sharded."""

    model: str
    base: torch.dtype
    recomputed: str | None
    strategy: ec.Strategy
    layout: str = "flat"

    @property
    def prepared(self) -> tuple[str, torch.dtype, str | None]:
        """What has to be known to make the model."""
        return self[:3]


EVERY = [Case(m, torch.float64, r, s) for m in MODELS for r in RECOMPUTED for s in PLAIN]
EVERY += [Case(m, torch.bfloat16, r, s) for m in MODELS for r in RECOMPUTED for s in PLAIN]
EVERY += [
    Case(m, torch.float64, None, s, "rows") for m in MODELS for s in PLAIN if has_effect(s, "rows")
]
# Each strategy and kind of recomputation with each model; ``tests/long`` has them all.
CASES = [
    Case(model, base, RECOMPUTED[(i + j) % 3], strategy)
    for i, model in enumerate(MODELS)
    for j, strategy in enumerate(PLAIN)
    for base in (torch.float64, torch.bfloat16)[: 2 if j == 0 else 1]
]
CASES += [Case(m, torch.float64, None, ec.Strategy.FULL_SHARD, "rows") for m in MODELS]
HYBRID = [s for s in ec.Strategy if s.hybrid]


@cache
def with_lora(name: str, base: torch.dtype, recomputed: str | None) -> nn.Module:
    """A model with adapters that are not zero; of a bfloat16 model they are in float32."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = MODELS[name][0]().to(base).train()
    if recomputed is not None:
        model.activation_checkpointing_enable({"use_reentrant": recomputed == "reentrant"})
        model.enable_input_require_grads()
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        lora_dropout=0.0,
        target_modules=TARGETS[name],
        fan_in_fan_out=name == "gpt2",
        init_lora_weights=False,
    )
    with warnings.catch_warnings():
        # peft 0.21 reads a name that transformers 5.23 has deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted = peft.get_peft_model(model, config)
    trainable = {p.dtype for p in adapted.parameters() if p.requires_grad}
    assert trainable == {torch.float32 if base == torch.bfloat16 else base}
    return adapted


def loss_of(model: nn.Module, one: dict[str, Tensor]) -> Tensor:
    """In the dtype of the logits, which the losses of the library are not."""
    logits = model(**one).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)),
                           one["labels"][:, 1:].flatten())  # fmt: skip


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """``eps`` is large, or it would make much of the rounding of gradients that are nearly 0."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-3)


class Trained(NamedTuple):
    """Losses of one rank, and the adapters at the end."""

    losses: list[float]
    state: dict[str, Tensor]


def adapters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if "lora_" in name}


@cache
def in_one_process(prepared: tuple[str, torch.dtype, str | None], size: int) -> list[Trained]:
    """The batches of all ranks one after another, and the mean of their gradients."""
    model = copy.deepcopy(with_lora(*prepared))
    optimizer = optimizer_of(model)
    losses: list[list[float]] = [[] for _ in range(size)]
    for step in range(STEPS):
        total: dict[str, Tensor] = {}
        for rank in range(size):
            optimizer.zero_grad()
            loss = loss_of(model, batch(prepared[0], step, rank))
            loss.backward()
            losses[rank].append(loss.item())
            for name, param in model.named_parameters():
                if param.grad is not None:
                    total[name] = total[name] + param.grad if name in total else param.grad.clone()
        for name, param in model.named_parameters():
            param.grad = total[name] / size if name in total else None
        optimizer.step()
    return [Trained(own, adapters(model.state_dict())) for own in losses]


def train(world: World, plain: nn.Module, case: Case, **options: Any) -> Trained:
    options = {"group": world.group, **options}
    model = ec.FSDP(
        copy.deepcopy(plain),
        options.pop("group"),
        units=ec.units.by_type(MODELS[case.model][1]),
        strategy=case.strategy,
        layout=case.layout,
        min_num_params=0,
        **options,
    )

    def losses(step: int) -> list[Tensor]:
        return [loss_of(model, batch(case.model, step, world.rank))]

    totals = reference.train(optimizer_of(model), STEPS, losses)
    return Trained(totals, adapters(model.state_dict()))


Models = dict[Any, nn.Module]


def train_all(world: World, cases: list[Case], models: Models | None) -> list[Trained]:
    """Train every case; models are made here if there are none, because hooks of some are local."""
    made = {c.prepared: with_lora(*c.prepared) for c in cases} if models is None else models
    return [train(world, made[case.prepared], case) for case in cases]


def check_bits(kind: str, cases: list[Case]) -> None:
    """Losses and adapters in a world of two ranks are those of one process, bit for bit."""
    pytest.importorskip("peft")
    models = {c.prepared: with_lora(*c.prepared) for c in cases} if kind == "threads" else None
    for rank, of_rank in enumerate(run_world(kind, train_all, 2, [cases, models])):
        for case, found in zip(cases, of_rank, strict=True):
            expected = in_one_process(case.prepared, 2)[rank]
            assert found.losses == expected.losses, case
            assert list(found.state) == list(expected.state)
            assert_states_equal(found.state, expected.state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_lora_gives_the_bits_of_one_process_in_every_world(kind: str) -> None:
    check_bits(kind, CASES)


def train_hybrid(world: World, models: Models) -> dict[Any, Trained]:
    mesh = world.mesh(replicate=2, shard=2)
    found = {}
    for prepared, model in models.items():
        for strategy in HYBRID:
            case = Case(*prepared, strategy)
            found[case] = train(
                world, model, case, group=mesh["shard"], replicate=mesh["replicate"]
            )
    return found


@pytest.mark.slow
def test_lora_under_hybrid_strategies_equals_one_process() -> None:
    prepared = [(name, torch.float64, "reentrant") for name in MODELS]
    models = {one: with_lora(*one) for one in prepared}
    for rank, of_rank in enumerate(run_world("threads", train_hybrid, 4, [models])):
        for case, found in of_rank.items():
            expected = in_one_process(case.prepared, 4)[rank]
            # Four gradients are added in pairs.
            assert found.losses == pytest.approx(expected.losses, rel=1e-12)
            assert_states_close(found.state, expected.state, rtol=1e-12, atol=1e-12)
