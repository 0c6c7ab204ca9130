"""Law *Parity* for FSDP: k steps are those of one process on all batches together."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon as ec
from echelon.comm.world import World
from tests import reference
from tests.fsdp.models import PLAIN, Block, batch, build, has_effect, loss_of, train_plain
from tests.reference import assert_states_close
from tests.worlds import run_world

STEPS = 2  # the second uses what the first left: optimizer state, order, memory
RULES = {
    "blocks": ec.units.by_type(Block),
    "leaves": ec.units.by_size(1),
    "whole": ec.units.whole(),
}


def train(world: World, options: dict[str, Any], clip: float | None) -> tuple[dict, list[float]]:
    options = {**options, "units": RULES[options["units"]]}
    model = ec.FSDP(build(seed=world.rank), world.group, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    ids = [id(p) for p in model.parameters()]

    def losses(step: int) -> Iterator[Tensor]:
        yield loss_of(model, *batch(step, world.rank))
        if clip is not None:
            ec.clip_grad_norm_(model, clip)

    means = torch.tensor(reference.train(optimizer, STEPS, losses), dtype=torch.float64)
    world.group.all_reduce(means, "mean")
    assert [id(p) for p in model.parameters()] == ids
    return model.state_dict(), means.tolist()


def compare(found: tuple[dict, list[float]], expected: tuple[dict, list[float]]) -> None:
    state, losses = found
    torch.testing.assert_close(losses, expected[1], rtol=1e-12, atol=1e-12)
    assert list(state) == list(expected[0])
    assert_states_close(state, expected[0], rtol=1e-11, atol=1e-12)


def train_all(world: World, every: list[tuple[dict[str, Any], float | None]]) -> list[Any]:
    return [train(world, options, clip) for options, clip in every]


COMBINATIONS = [
    ({"strategy": strategy, "layout": layout, "units": rule, "min_num_params": least}, clip)
    for (strategy, layout, rule), least, clip in zip(
        itertools.product(PLAIN, ("flat", "rows"), RULES),
        itertools.cycle((0, 0, 100)),
        itertools.cycle((None, 0.1)),
    )
    if has_effect(strategy, layout, least)
]


# More ranks, and those that are processes, cost more: each strategy and layout with one rule.
FEWER = [
    combination
    for i, combination in enumerate(COMBINATIONS)
    if i % len(RULES) == (i // len(RULES)) % len(RULES)
]


@pytest.mark.slow_for("1", "3", "4", "processes", "gloo")
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *(("threads", n) for n in (1, 2, 3, 4)),
        *(("processes", n) for n in (2, 3)),
        ("gloo", 2),
    ],
)
def test_training_equals_one_process(kind: str, ranks: int) -> None:
    expected = {clip: train_plain(ranks, STEPS, clip=clip) for clip in (None, 0.1)}
    combinations = COMBINATIONS if kind == "threads" and ranks < 3 else FEWER
    for found in run_world(kind, train_all, ranks, (combinations,)):
        for (_, clip), one in zip(combinations, found, strict=True):
            compare(one, expected[clip])
