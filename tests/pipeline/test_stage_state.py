"""States of a model in stages go to the plain model and back, whole or as parts."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError
from tests.pipeline.split_models import Decoder, loss_fn
from tests.pipeline.tied_stages import CLOSE, ROWS, plan, tied_stages, tokens_of
from tests.reference import assert_states_close
from tests.worlds import run_world


def adam(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, so that not every stage has a parameter in each."""
    named = dict(model.named_parameters())
    ends = ("up.weight", "down.weight", "embed.weight", "head.weight")
    matrices = [param for name, param in named.items() if name.endswith(ends)]
    others = [param for name, param in named.items() if not name.endswith(ends)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.05)


def steps(pipe: ec.Pipeline, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        x, y = tokens_of(step, ROWS)  # the same on all ranks
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        x, y = tokens_of(step, ROWS)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer over the plain model, by name."""
    names = {id(param): name for name, param in model.named_parameters()}
    state = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = [names[id(param)] for param in params]
    return {
        "state": {own[i]: value for i, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [own[i] for i in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def same(found: Any, expected: Any) -> None:
    """Equal names; values up to the order of sums."""
    assert sorted(found["state"]) == sorted(expected["state"])
    for name, values in expected["state"].items():
        assert_states_close(found["state"][name], values, **CLOSE)
    for one, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert sorted(one["params"]) == sorted(other["params"])
        assert (one["lr"], one["weight_decay"]) == (other["lr"], other["weight_decay"])


def there_and_back(world: World, one: ec.Plan) -> None:
    plain, pipe = tied_stages(one, world)
    optimizer, reference = adam(pipe), adam(plain)
    steps(pipe, optimizer, range(2))
    plain_steps(plain, reference, range(2))

    state, its_state = pipe.whole_state_dict(), pipe.optimizer_state_dict(optimizer)
    assert set(state) == set(plain.state_dict())
    same(its_state, by_name(plain, reference))
    assert bool(pipe.whole_state_dict(rank0_only=True)) == (world.rank < one.num_ranks // one.pp)
    parts = pipe.sharded_state_dict()

    # Into the plain model, which goes on ...
    loaded = Decoder().double()
    loaded.load_state_dict(state)
    plain_steps(plain, reference, range(2, 4))
    goes_on = adam(loaded)
    numbers = [name for group in its_state["param_groups"] for name in group["params"]]
    params = dict(loaded.named_parameters())
    for name in numbers:
        goes_on.state[params[name]] = copy.deepcopy(its_state["state"][name])
    plain_steps(loaded, goes_on, range(2, 4))
    assert_states_close(loaded.state_dict(), plain.state_dict(), **CLOSE)

    # ... and back: what came after is undone, and comes again.
    steps(pipe, optimizer, range(7, 8))
    for load in (lambda: pipe.load_state_dict(state), lambda: pipe.load_sharded_state_dict(parts)):
        for group in optimizer.param_groups:
            group["lr"] = 9.0
        load()
        pipe.load_optimizer_state_dict(optimizer, its_state)
        steps(pipe, optimizer, range(2, 4))
        assert_states_close(pipe.whole_state_dict(), plain.state_dict(), **CLOSE)

    refuses(pipe, optimizer, parts, its_state)


def refuses(pipe: ec.Pipeline, optimizer: Any, parts: Any, its_state: Any) -> None:
    wrong = {**parts, "other": 1}
    del wrong["shift"]
    with pytest.raises(ArgumentError, match="other: unexpected; shift: missing"):
        pipe.load_sharded_state_dict(wrong)
    groups = [{**group, "params": group["params"][:0]} for group in its_state["param_groups"]]
    with pytest.raises(ArgumentError, match="missing"):
        pipe.load_optimizer_state_dict(optimizer, {"state": {}, "param_groups": groups})
    with pytest.raises(ArgumentError, match="a dict with 'state'"):
        pipe.load_optimizer_state_dict(optimizer, {})
    other = adam(Decoder())
    for param in other.param_groups[0]["params"]:
        other.state[param] = {"step": torch.ones(())}
    with pytest.raises(ArgumentError, match="in no stage of this rank"):
        pipe.optimizer_state_dict(other)
    with pytest.raises(ArgumentError, match="rank0_only is 3"):
        pipe.whole_state_dict(rank0_only=3)


def every_plan(world: World, plans: list[ec.Plan]) -> None:
    for one in plans:
        there_and_back(world, one)


FLAT = {"min_num_params": 0}
PLANS = {
    "threads": [plan("1f1b", shard=2, fsdp=FLAT)],
    "gloo": [plan("zb-v", shard=2, fsdp=FLAT), plan("1f1b", dp=2)],
}


@pytest.mark.parametrize("world", PLANS)
def test_a_state_goes_to_the_plain_model_and_back(world: str) -> None:
    run_world(world, every_plan, 4, (PLANS[world],))


def groups_apart(world: World) -> None:
    """The embedding decays on its rank, and the head, which it is, does not."""
    _, pipe = tied_stages(ec.Plan(pp=2, microbatches=3), world)
    groups = [[*pipe.parameters()], []] if world.rank else [[], [*pipe.parameters()]]
    optimizer = torch.optim.SGD([{"params": own} for own in groups], lr=0.1, momentum=0.9)
    with pytest.raises(StateError, match=r"'inner.embed.weight' is in different groups"):
        pipe.optimizer_state_dict(optimizer)


def test_a_shared_parameter_in_two_groups_is_refused() -> None:
    run_world("threads", groups_apart, 2)
