"""Gathers that begin before their unit is needed: when, how many, and with the same weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.reference import assert_states_close, rows, train_alone
from tests.worlds import run_world

PRE, POST, NONE = ec.BackwardPrefetch
LAYERS, WIDTH = 5, 4


class Row(nn.Module):
    """Layers in an order that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


ORDERS = [[0, 1, 2, 3, 4]] * 3 + [[4, 0, 2, 1, 3], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 1, 2, 3, 4]]


def train(world: ec.World, options: dict[str, Any]) -> tuple[list[list[str]], dict[str, Tensor]]:
    """What happened in each step, in short: ``g2`` a gather of layer 2, ``p`` ahead, ``r`` away."""
    torch.manual_seed(0)
    rule = ec.units.by_type(nn.Linear)
    model = ec.FSDP(Row().double(), world.group, units=rule, min_num_params=0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[list[str]] = []

    def listen(event: ec.events.Event) -> None:
        mine = event.facts.get("rank") == world.rank
        if mine and event.name.startswith("fsdp.") and event.facts["unit"] != "root":
            steps[-1].append(event.name[5] + event.facts["unit"].removeprefix("layers."))

    with ec.events.listen(listen):
        for step, order in enumerate(ORDERS):
            steps.append([])
            loss = model(rows(world.rank, 3, WIDTH, step=step), order).square().mean()
            steps[-1].append("|")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return steps, model.state_dict()


def plain(size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Row().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(step: int) -> list[Tensor]:
        x = torch.cat([rows(rank, 3, WIDTH, step=step) for rank in range(size)])
        return [model(x, ORDERS[step]).square().mean()]

    return train_alone(model, optimizer, len(ORDERS), losses)


OPTIONS = [
    {"backward_prefetch": backward, "forward_prefetch": depth, "limit_all_gathers": limit}
    for backward, (depth, limit) in itertools.product(
        ec.BackwardPrefetch, ((0, True), (1, True), (4, True), (4, False))
    )
]


def train_all(world: ec.World) -> list[Any]:
    return [train(world, {"layout": "rows", **options}) for options in OPTIONS]


@pytest.fixture(scope="module")
def over_gloo() -> list[list[Any]]:
    return run_world("gloo", train_all, 2)


def halves(found: list[list[Any]], **options: Any) -> tuple[str, str]:
    """Forward and backward of the third step, whose order is that of the second."""
    steps, _ = found[0][OPTIONS.index(options)]
    forward, backward = " ".join(steps[2]).split(" | ")
    return forward, backward


@pytest.mark.slow
def test_the_weights_are_those_of_one_process(over_gloo: list[list[Any]]) -> None:
    expected = plain(2)
    for rank in over_gloo:
        for _, state in rank:
            assert_states_close(state, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("when", "events"),
    [
        (NONE, "g4 r4 g3 r3 g2 r2 g1 r1 g0 r0"),
        (PRE, "p4 p3 r4 p2 r3 p1 r2 p0 r1 r0"),
        (POST, "g4 r4 p3 r3 p2 r2 p1 r1 p0 r0"),
    ],
)
def test_backward_gathers_the_next_unit(
    over_gloo: list[list[Any]], when: ec.BackwardPrefetch, events: str
) -> None:
    options = {"backward_prefetch": when, "forward_prefetch": 0, "limit_all_gathers": True}
    forward, backward = halves(over_gloo, **options)
    assert forward == "g0 r0 g1 r1 g2 r2 g3 r3 g4 r4"
    assert backward == events


@pytest.mark.parametrize(
    ("depth", "limit", "events"),
    [
        (1, True, "g0 p1 r0 p2 r1 p3 r2 p4 r3 r4"),
        (4, True, "g0 p1 p2 r0 p3 r1 p4 r2 r3 r4"),
        (4, False, "g0 p1 p2 p3 p4 r0 r1 r2 r3 r4"),
    ],
)
def test_forward_gathers_ahead_and_never_more_than_two_where_limited(
    over_gloo: list[list[Any]], depth: int, limit: bool, events: str
) -> None:
    options = {"backward_prefetch": NONE, "forward_prefetch": depth, "limit_all_gathers": limit}
    assert halves(over_gloo, **options)[0] == events


def test_another_order_gathers_when_needed_and_leaves_nothing_whole(
    over_gloo: list[list[Any]],
) -> None:
    options = {"backward_prefetch": PRE, "forward_prefetch": 1, "limit_all_gathers": True}
    steps, _ = over_gloo[0][OPTIONS.index(options)]
    for events in steps:
        whole = [event[1] for event in events if event[0] in "gp"]
        away = [event[1] for event in events if event[0] == "r"]
        assert sorted(whole) == sorted(away)  # what was begun was released, needed or not
    assert "p" not in "".join(steps[3][1:9])  # the guess failed at once: no more of them
    assert steps[5][0] == "g0"


@pytest.mark.slow
def test_where_memory_is_shared_the_options_change_nothing() -> None:
    expected = plain(2)
    for options in OPTIONS:
        for _, state in ec.run(train, 2, args=(options,)):
            assert_states_close(state, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backward_prefetch", "PRE"),
        ("backward_prefetch", None),
        ("forward_prefetch", -1),
        ("forward_prefetch", True),
        ("limit_all_gathers", 2),
    ],
)
def test_a_bad_option_is_refused(name: str, value: object) -> None:
    def main(world: ec.World) -> None:
        with pytest.raises(ec.ArgumentError, match=f"^{name} is "):
            ec.FSDP(nn.Linear(2, 2), world.group, **{name: value})

    ec.run(main, 1)
