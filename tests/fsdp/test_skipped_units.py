"""Ranks that skip different units in different steps, as with LayerDrop or a mixture of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon.errors import CollectiveMismatch, CommError
from tests.comm.gloo_ranks import gloo_outcomes
from tests.fsdp.models import Block
from tests.reference import assert_states_close, rows, train_on
from tests.worlds import run_world

WIDTH, BLOCKS = 6, 6


class Mixture(Block):
    """Two experts, of which a rank may use one: half of the unit gets no gradient there."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 7)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return x + self.other(x) if not both else super().forward(x) + self.other(x)


class Skipping(nn.Module):
    """Uses the blocks that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mixture() for _ in range(BLOCKS))

    def forward(self, x: Tensor, used: list[int], both: bool) -> Tensor:
        x = self.first(x)
        for i in used:
            x = self.blocks[i](x, both)
        return x


# By step and rank: which blocks it uses. Everyone skips block 3 at first.
USED = [
    [[0, 2, 4, 5], [1, 2, 5], [0, 1]],
    [[0, 1, 2, 3, 4, 5], [0, 5], [2, 3, 4]],
    [[5], [0, 1, 2, 3], []],
    [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]],
]


def inputs(step: int, rank: int) -> Tensor:
    return rows(rank, 2, WIDTH, step=step)


def build() -> Skipping:
    torch.manual_seed(0)
    return Skipping().double()


def shard(world: ec.World, model: nn.Module, **options: Any) -> ec.FSDP:
    rule = ec.units.by_type(Mixture)
    return ec.FSDP(model, world.group, **{"units": rule, "min_num_params": 0, **options})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05)


def train(world: ec.World, **options: Any) -> dict[str, Tensor]:
    model = shard(world, build(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def loss_of(step: int, rank: int) -> Tensor:
        both = (step + rank) % 2 == 0
        x = inputs(step, rank)
        with torch.no_grad():
            model(x, USED[step - 1][rank], both)
        return model(x, USED[step][rank], both).square().mean()

    state = train_on([world.rank], model, optimizer, len(USED), loss_of)
    assert not any(unit.gathered for unit in model.units)
    return state


def plain(size: int) -> dict[str, Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def loss_of(step: int, rank: int) -> Tensor:
        both = (step + rank) % 2 == 0
        return model(inputs(step, rank), USED[step][rank], both).square().mean()

    return train_on(range(size), model, optimizer, len(USED), loss_of)


OPTIONS: list[dict[str, Any]] = [
    {"backward_prefetch": ec.BackwardPrefetch.NONE},
    {"forward_prefetch": 3, "layout": "rows"},
    {"backward_prefetch": ec.BackwardPrefetch.POST},
    {"strategy": ec.Strategy.SHARD_GRAD_OP},
]


def train_all(world: ec.World) -> list[dict[str, Tensor]]:
    # Where memory is shared, nothing is gathered, and nothing is gathered early.
    options = OPTIONS[:1] if world.group.shares_memory else OPTIONS
    return [train(world, **one) for one in options]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [("threads", 3), ("processes", 2), ("gloo", 3)])
def test_ranks_may_skip_different_units(kind: str, ranks: int) -> None:
    expected = plain(ranks)
    for states in run_world(kind, train_all, ranks, timeout=20):
        for state in states:
            assert_states_close(state, expected, rtol=1e-11, atol=1e-12)


def train_in_other_orders(world: ec.World) -> None:
    model = shard(world, build())
    order = [0, 1, 2] if world.rank == 0 else [2, 1, 0]
    for step in range(2):
        model(inputs(step, world.rank), order, True).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_ranks_that_run_units_in_other_orders_end_with_an_error_that_names_one(check: bool) -> None:
    for error, _ in gloo_outcomes(train_in_other_orders, 2, check=check, timeout=2.0):
        assert isinstance(error, CollectiveMismatch if check else CommError)
        assert "unit blocks." in str(error)


# By rank: which blocks it uses in its first steps, before any order was seen.
FIRST = [
    [[3, 1], [2], [0, 4]],
    [[5], [0, 1, 2, 3, 4], [1, 3]],
    [[], [4], [2]],
]


def train_first(ranks: range | list[int], model: nn.Module) -> dict[str, Tensor]:
    def loss_of(step: int, rank: int) -> Tensor:
        return model(inputs(step, rank), sorted(FIRST[step][rank]), True).square().mean()

    return train_on(ranks, model, sgd(model), len(FIRST), loss_of)


def train_from_the_first_step(world: ec.World) -> dict[str, Tensor]:
    return train_first([world.rank], shard(world, build()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_ranks_may_skip_different_units_from_the_first_step(kind: str) -> None:
    expected = train_first(range(3), build())
    for state in run_world(kind, train_from_the_first_step, 3, timeout=20):
        assert_states_close(state, expected, rtol=1e-11, atol=1e-12)


AFTER = [1, 2, 0, 3]  # by step: what the second forward uses
STEPS = [(0, 1, 2, 0, 1), (3, 1, 0, 3, 2)]


def once(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(inputs(step, rank), USED[step][rank], True).square().mean()


def twice_through_one_graph(model: nn.Module, step: int, rank: int) -> None:
    loss = once(model, step, rank)
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def both_at_once(model: nn.Module, step: int, rank: int) -> None:
    (once(model, step, rank) + 2 * once(model, AFTER[step], rank)).backward()


def the_first_one_last(model: nn.Module, step: int, rank: int) -> None:
    first, second = once(model, step, rank), 2 * once(model, AFTER[step], rank)
    second.backward()
    first.backward()


def an_evaluation_between(model: nn.Module, step: int, rank: int) -> None:
    loss = once(model, step, rank)
    with torch.no_grad():
        once(model, AFTER[step], rank)
    (3 * loss).backward()


KINDS = [twice_through_one_graph, both_at_once, the_first_one_last, an_evaluation_between]


def train_with_all_kinds(world: ec.World, steps: tuple[int, ...]) -> list[dict[str, Tensor]]:
    states = []
    for kind in KINDS:
        for strategy in (ec.Strategy.SHARD_GRAD_OP, ec.Strategy.FULL_SHARD):
            model = shard(world, build(), strategy=strategy)
            optimizer = sgd(model)
            for step in steps:
                kind(model, step, world.rank)
                optimizer.step()
                optimizer.zero_grad()
            states.append(model.state_dict())
    return states


@pytest.mark.slow
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("world", ["threads", "gloo"])
def test_ranks_may_skip_units_that_were_released_before_their_backward(
    world: str, steps: tuple[int, ...]
) -> None:
    states = []
    for kind in KINDS:
        model = build()
        optimizer = sgd(model)
        for step in steps:
            for rank in range(3):
                kind(model, step, rank)
            for param in model.parameters():
                if param.grad is not None:
                    param.grad /= 3
            optimizer.step()
            optimizer.zero_grad()
        states += 2 * [model.state_dict()]
    train = partial(train_with_all_kinds, steps=steps)
    for those in run_world(world, train, 3, timeout=20):
        for state, expected in zip(those, states, strict=True):
            assert_states_close(state, expected, rtol=1e-11, atol=1e-12)


class Around(nn.Module):
    """A unit with a frozen one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Mixture().requires_grad_(False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(self.linear(x))


class Nested(nn.Module):
    """Backward reaches a unit before the one inside; and what a checkpoint runs again, in order."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.outer = Around()
        self.pair = nn.ModuleList(Mixture() for _ in range(2))
        self.last = Around()

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = self.first(x)
        if 0 in used:
            x = self.outer(x)
        if 1 in used:
            x = checkpoint(self.both, x, use_reentrant=self.reentrant)
        return self.last(x) if 2 in used else x

    def both(self, x: Tensor) -> Tensor:
        return self.pair[1](self.pair[0](x))


def train_nested_on(
    ranks: range | list[int], model: nn.Module, first_step: int
) -> dict[str, Tensor]:
    used = FIRST[first_step:]

    def loss_of(step: int, rank: int) -> Tensor:
        return model(inputs(first_step, rank), used[step][rank]).square().mean()

    return train_on(ranks, model, sgd(model), len(used), loss_of)


def nested(reentrant: bool) -> nn.Module:
    torch.manual_seed(1)
    return Nested(reentrant).double()


def train_nested(
    world: ec.World, step: int, strategy: ec.Strategy, reentrant: bool
) -> dict[str, Tensor]:
    rule = ec.units.by_type(Mixture, Around)
    model = shard(world, nested(reentrant), units=rule, strategy=strategy)
    return train_nested_on([world.rank], model, step)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", [ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("step", range(len(FIRST)))
def test_ranks_may_skip_units_inside_of_units_from_the_first_step(
    step: int, strategy: ec.Strategy, reentrant: bool
) -> None:
    expected = train_nested_on(range(3), nested(reentrant), step)
    train = partial(train_nested, step=step, strategy=strategy, reentrant=reentrant)
    for kind in ("threads", "gloo"):
        for state in run_world(kind, train, 3, timeout=20):
            assert_states_close(state, expected, rtol=1e-11, atol=1e-12)


class Prefixed(nn.Module):
    """Frozen units, which backward comes to where the unit before them was used."""

    def __init__(self) -> None:
        super().__init__()
        self.early = Mixture()
        self.frozen = nn.ModuleList(Mixture().requires_grad_(False) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, early: bool) -> Tensor:
        x = self.early(x) if early else x
        for block in self.frozen:
            x = block(x)
        return self.head(x)


EARLY = [(False, False, False), (True, False, False), (False, True, True), (True, True, True)]


def prefixed() -> nn.Module:
    torch.manual_seed(1)
    return Prefixed().double()


def train_early(ranks: range | list[int], model: nn.Module) -> dict[str, Tensor]:
    def loss_of(step: int, rank: int) -> Tensor:
        return model(inputs(step, rank), EARLY[step][rank]).square().mean()

    return train_on(ranks, model, sgd(model), len(EARLY), loss_of)


def train_prefixed(world: ec.World) -> list[dict[str, Tensor]]:
    return [
        train_early([world.rank], shard(world, prefixed(), strategy=strategy))
        for strategy in (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP)
    ]


@pytest.mark.parametrize("world", ["threads", "gloo"])
def test_backward_may_come_to_frozen_units_that_it_never_came_to(world: str) -> None:
    expected = train_early(range(3), prefixed())
    for states in run_world(world, train_prefixed, 3, timeout=20):
        for state in states:
            assert_states_close(state, expected, rtol=1e-11, atol=1e-12)
