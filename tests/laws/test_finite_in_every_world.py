"""What is not finite on one rank is a reason for all, in every world and every way to share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import NonFiniteError
from tests.guarded_models import INF, NAN, WAYS, Block, data, gradients, poke, spoil
from tests.worlds import KINDS, run_world

RANKS = 4
# How rank 2 goes wrong; each with NaN and with Inf.
WRONG = ("input", "backward", "gradient")
FAULTY = 2
# Whose batch that is, where several ranks share one: the first reads inputs, the last targets.
BATCH_OF = {"Pipeline": {0, 3}, "DDP in stages": {0, 2}, "FSDP in stages": {0, 2}}


def wrong_gradients(
    world: World, model: nn.Module, way: str, how: str, value: float, step: int
) -> Any:
    """The loss of a step that goes wrong on one rank."""
    x, y = data(step, world.rank)
    faulty = world.rank == FAULTY
    if how == "input" and world.rank in BATCH_OF.get(way, {FAULTY}):
        x[0, 0] = y[0, 0] = value
    if how == "backward" and faulty:
        spoil(model, value)
    loss = gradients(model, x, y)
    if how == "gradient" and faulty:
        poke(model, value)
    for module in model.modules():
        if isinstance(module, Block):
            module.spoiled = None
    return loss


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for param in model.parameters():
        yield ec.local_shard(param).clone()
        yield from (v.clone() for v in optimizer.state[param].values() if isinstance(v, Tensor))


def skips(world: World, way: str, how: str, value: float) -> NonFiniteError:
    """Of three steps the second goes wrong; returns what was found."""
    model = WAYS[way](world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = ec.FiniteGuard(model, world.group, action=ec.NonFinite.SKIP)
    for step in range(3):
        before = [*state_of(model, optimizer)]
        if step == 1:
            loss = wrong_gradients(world, model, way, how, value, step)
        else:
            loss = gradients(model, *data(step, world.rank))
        allowed = guard.allows_step(loss)
        assert allowed == (step != 1)
        if allowed:
            optimizer.step()
            optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        after = [*state_of(model, optimizer)]
        numel = sum(ec.local_shard(p).numel() for p in model.parameters())
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        assert same == (step == 1 or numel == 0)
    assert (guard.step, guard.skipped, guard.stopped) == (3, 1, False)
    assert guard.found is not None
    return guard.found


def every_way_skips(
    world: World, values: tuple[float, ...] = (NAN, INF)
) -> list[tuple[str, str, NonFiniteError]]:
    found = []
    for way in WAYS:
        for how in WRONG:
            for value in values:
                try:
                    found.append((way, how, skips(world, way, how, value)))
                except BaseException as error:
                    error.add_note(f"{way}, {how}, {value}")
                    raise
    return found


def check_skips(kind: str, *values: float) -> None:
    """Refuse ranks that do not all skip the same step, or that find something else."""
    results = run_world(kind, every_way_skips, RANKS, (values,))
    for one in zip(*results, strict=True):  # all ranks found the same
        assert len({str(error) for _, _, error in one}) == 1
        way, how, error = one[0]
        assert error.step == 2
        if how == "input":
            assert set(error.losses) == {max(BATCH_OF.get(way, {FAULTY}))}, (way, error)
            continue
        assert error.losses == {}
        ranks = {rank for found in error.gradients.values() for rank in found}
        if how == "gradient" or way == "plain":
            assert ranks == {FAULTY}, (way, error)  # and no other
        else:
            assert FAULTY in ranks, (way, error)
        if how == "gradient" and way != "flat FSDP":
            prefix = {"Pipeline": "2.layer.", "DDP in stages": "1.layer.",
                      "FSDP in stages": "1.layer."}.get(way, "")  # fmt: skip
            assert next(iter(error.gradients)).startswith(prefix), (way, error)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_skip_what_is_not_finite_on_one_and_then_train_on(kind: str) -> None:
    # Messages take longest over gloo; tests/long has Inf there, too.
    check_skips(kind, *((NAN,) if kind == "gloo" else (NAN, INF)))


def clips(world: World) -> None:
    for way in ("DDP", "FSDP", "hybrid FSDP", "DDP in stages", "FSDP in stages"):
        model = WAYS[way](world)
        guard = ec.FiniteGuard(model, world.group, action=ec.NonFinite.SKIP)
        gradients(model, *data(0, world.rank))
        assert guard.allows_step(None, ec.clip_grad_norm_(model, 0.1))
        gradients(model, *data(0, world.rank))
        if world.rank == FAULTY:
            poke(model, NAN)
        assert not guard.allows_step(None, ec.clip_grad_norm_(model, 0.1)), way
        assert {r for found in guard.found.gradients.values() for r in found} == {FAULTY}, way
        assert guard.found.norms == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_of_clipping_spares_the_look_and_the_parameters_are_named(kind: str) -> None:
    run_world(kind, clips, RANKS)
