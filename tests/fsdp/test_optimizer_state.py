"""The state of an optimizer over a sharded model: by name, and the same on any number of ranks."""

from __future__ import annotations

import copy
import io
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError, UnsupportedError
from tests.fsdp.checking import shard
from tests.fsdp.models import Block, batch, build, loss_of
from tests.reference import assert_states_close
from tests.worlds import run_world

ROWS = 6  # of a step, whatever the number of ranks
BEFORE, AFTER = 2, 2  # steps before and after the stop
CLOSE = {"rtol": 1e-8, "atol": 1e-10}  # ranks add gradients in another order than one process


def grouped(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """An optimizer with two groups, over all parameters, the frozen ones too."""
    matrices = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "lr": 0.02}]
    if name == "AdamW":
        groups[0]["weight_decay"] = 0.1
        return torch.optim.AdamW(groups, lr=0.05)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, world: World | None, steps: range):
    """Every rank takes its share of the rows of a step."""
    size, rank = (1, 0) if world is None else (world.size, world.rank)
    for step in steps:
        tokens, targets = batch(step, 0, ROWS)
        mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
        loss_of(model, tokens[mine], targets[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a plain model's optimizer, by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        "state": {names[id(p)]: copy.deepcopy(entry) for p, entry in optimizer.state.items()},
        "param_groups": [
            {**group, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


@cache
def plain_run(name: str, steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = build()
    optimizer = grouped(model, name)
    train(model, optimizer, None, range(steps))
    return model.state_dict(), named(model, optimizer)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two optimizer states by name, in any order of parameters."""
    assert found.keys() == expected.keys()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for name, entry in expected["state"].items():
        assert_states_close(found["state"][name], entry, **CLOSE)


def packed(*values: Any) -> bytes:
    memory = io.BytesIO()
    torch.save(values, memory)
    return memory.getvalue()


def saves(world: World, name: str, options: dict[str, Any]) -> bytes:
    """Train, compare with one process, and save."""
    model = shard(world, **options)
    optimizer = grouped(model, name)
    train(model, optimizer, world, range(BEFORE))
    state = model.optimizer_state_dict(optimizer)
    same(state, plain_run(name, BEFORE)[1])
    return packed(model.state_dict(), state)


def resumes(world: World, name: str, options: dict[str, Any], saved: bytes) -> None:
    """Load, go on, and compare with one process that never stopped."""
    weights, state = torch.load(io.BytesIO(saved))
    model = shard(world, build(seed=9), **options)
    optimizer = grouped(model, name)
    for group in optimizer.param_groups:
        group["lr"] = 7.0  # what is saved replaces it
    model.load_state_dict(weights)
    model.load_optimizer_state_dict(optimizer, state)
    same(model.optimizer_state_dict(optimizer), state)
    train(model, optimizer, world, range(BEFORE, BEFORE + AFTER))
    expected, _ = plain_run(name, BEFORE + AFTER)
    assert_states_close(model.state_dict(), expected, **CLOSE)


WAYS: list[dict[str, Any]] = [
    {"layout": "flat"},
    {"layout": "rows", "units": ec.units.whole()},
    {"layout": "rows", "min_num_params": 120},  # some units are whole on every rank
]


def save_and_resume(world: World, name: str) -> None:
    """In one world, from each way of cutting to the next."""
    for i, options in enumerate(WAYS):
        resumes(world, name, WAYS[i - 1], saves(world, name, options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_training_goes_on_with_other_ranks_layout_and_units(name) -> None:
    for i, options in enumerate(WAYS):
        saved = ec.run(saves, 3, args=(name, options))[0]
        ec.run(resumes, 2, args=(name, WAYS[i - 1], saved))


def test_the_state_of_a_plain_model_is_loaded() -> None:
    saved = packed(*plain_run("AdamW", BEFORE))
    ec.run(resumes, 3, args=("AdamW", {"layout": "rows"}, saved))


def test_a_plain_model_loads_what_ranks_saved() -> None:
    weights, state = torch.load(io.BytesIO(ec.run(saves, 2, args=("AdamW", {}))[0]))
    model = build(seed=9)
    optimizer = grouped(model, "AdamW")
    model.load_state_dict(weights)
    own = named(model, optimizer)
    names = [name for group in own["param_groups"] for name in group["params"]]
    numbers = {name: i for i, name in enumerate(names)}
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: entry for name, entry in state["state"].items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]}
                for group in state["param_groups"]
            ],
        }
    )
    train(model, optimizer, None, range(BEFORE, BEFORE + AFTER))
    assert_states_close(model.state_dict(), plain_run("AdamW", BEFORE + AFTER)[0], **CLOSE)


def owns_nothing(world: World) -> None:
    """More ranks than rows: some have a state of no elements."""
    model = shard(world, Block(2, 2), layout="rows", units=ec.units.whole())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = model.optimizer_state_dict(optimizer)
    assert state["state"]["up.weight"]["exp_avg"].shape == (2, 2)
    assert state["state"]["scale"]["exp_avg"].shape == ()
    before = {id(p): copy.deepcopy(entry) for p, entry in optimizer.state.items()}
    optimizer.state.clear()
    model.load_optimizer_state_dict(optimizer, state)
    for param, entry in optimizer.state.items():
        assert entry["exp_avg"].shape == ec.local_shard(param).shape
        for key, value in entry.items():
            assert torch.equal(value, before[id(param)][key])


def test_ranks_that_own_nothing_of_a_parameter_save_and_load() -> None:
    ec.run(owns_nothing, 4)


# --- refusals ------------------------------------------------------------------------------------


def refuses(world: World) -> None:
    model = shard(world)
    optimizer = grouped(model, "AdamW")
    train(model, optimizer, world, range(1))
    state = model.optimizer_state_dict(optimizer)

    def entry(**changes: Any) -> dict[str, Any]:
        return {**state, "state": {**state["state"], **changes}}

    first, second = state["param_groups"]
    short = {**first, "params": [n for n in first["params"] if n != "tokens.weight"]}
    moved = {**second, "params": [*second["params"], "tokens.weight"]}
    wrong_shape = {**state["state"]["tokens.weight"], "exp_avg": torch.ones(2)}
    for wrong, words in [
        ({}, "a dict with 'state' and 'param_groups'"),
        (entry(nobody={}), "nobody: unexpected"),
        ({**state, "param_groups": [short, second]}, r"tokens\.weight: missing"),
        ({**state, "param_groups": [short, moved]}, "no group of it has the"),
        (
            entry(**{"tokens.weight": wrong_shape}),
            r"'exp_avg' of 'tokens\.weight' has shape \(2,\) instead of \(11, 6\)",
        ),
    ]:
        with pytest.raises(ArgumentError, match=words):
            model.load_optimizer_state_dict(optimizer, wrong)
    same(model.optimizer_state_dict(optimizer), state)
    for call in (
        model.optimizer_state_dict,
        lambda other: model.load_optimizer_state_dict(other, state),
    ):
        with pytest.raises(ArgumentError, match="group 0 of the optimizer has a parameter"):
            call(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    if world.rank:
        del optimizer.state[model.tokens.weight]
    message = r"hold different states; .*'tokens\.weight':\n  rank 0: .*\n  rank 1: not there"
    with pytest.raises(StateError, match=message):
        model.optimizer_state_dict(optimizer)


def refuses_factors(world: World) -> None:
    model = shard(world, nn.Linear(6, 6, bias=False), layout="rows", units=ec.units.whole())
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.state[model.weight] = {"step": torch.tensor(1.0), "row_var": torch.ones(3, 1)}
    with pytest.raises(UnsupportedError, match=r"state 'row_var' of 'weight' has shape \(3, 1\)"):
        model.optimizer_state_dict(optimizer)
    optimizer.state[model.weight] = {"old": [torch.ones(3, 6)]} if world.rank else {}
    with pytest.raises(UnsupportedError, match="state 'old' of 'weight' is a list on rank 1"):
        model.optimizer_state_dict(optimizer)


def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing() -> None:
    ec.run(refuses, 2)
    ec.run(refuses_factors, 2)


# --- other worlds --------------------------------------------------------------------------------


def every_check(world: World) -> None:
    save_and_resume(world, "AdamW")
    for check in (refuses, refuses_factors, owns_nothing):
        check(world)


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_all_of_it_holds_in_other_worlds(kind) -> None:
    run_world(kind, every_check, 2)
