"""Gradients that a user keeps over ``zero_grad()`` keep their values, as in plain torch."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.worlds import run_world

# How somebody holds a gradient, and what shows its values then.
WAYS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "itself": (lambda grad: grad, lambda grad: grad),
    "a view": (lambda grad: grad.flatten()[:1], lambda view: view),
    "detached": (lambda grad: grad.detach(), lambda grad: grad),
    "an array": (lambda grad: grad.numpy(), torch.from_numpy),
}
MODELS = {
    "overlap": {},
    "several buckets": {"bucket_bytes": 80, "first_bucket_bytes": 80},
    "a sum": {"reduction": "sum"},
    "another dtype": {"gradient_dtype": torch.float64},
    "manual": {"sync": "manual"},
}


def wrapped(world: World, options: dict[str, Any], width: int = 8) -> ec.DDP:
    torch.manual_seed(0)
    return ec.DDP(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2)), world.group, **options)


def step(
    model: ec.DDP, factor: float, options: dict[str, Any], *, local_first: bool = False
) -> None:
    with model.no_sync() if local_first else contextlib.nullcontext():
        (model(torch.ones(2, 8)).sum() * factor).backward()
    if local_first:
        model(torch.ones(2, 8)).sum().backward()
    if options.get("sync") == "manual":
        model.sync_gradients()


def keeps(world: World) -> None:
    for options in MODELS.values():
        for hold, values in WAYS.values():
            for local_first in (False, True):
                model, kept, copies = wrapped(world, options), [], []
                for factor in (1.0, -3.0, 5.0, 7.0):
                    model.zero_grad()
                    step(model, factor, options, local_first=local_first)
                    kept += [hold(p.grad) for p in model.parameters()]
                    copies += [values(held).clone() for held in kept[len(copies) :]]
                assert all(torch.equal(values(a), b) for a, b in zip(kept, copies, strict=True))
                assert not torch.equal(copies[4], copies[8])


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_gradients_that_are_kept_over_zero_grad_keep_their_values(kind: str) -> None:
    run_world(kind, keeps, 2)


def one_keeps(world: World) -> None:
    model, width = wrapped(world, {}, 1 << 15), 1 << 15  # the first weight has 1 MiB
    plain = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2))
    plain.load_state_dict(model.module.state_dict())
    held, seen = [], []
    for i in range(7):
        for one in (model, plain):
            one.zero_grad()
        model(torch.full((2, 8), i + world.rank + 1.0)).sum().backward()
        plain(torch.full((2, 8), i + 1.5)).sum().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        if i == 2 and not world.rank:
            held.append(model.module[0].weight.grad)
        elif i == 4:
            held.clear()
        seen.append(model.module[0].weight.grad.data_ptr())
    assert seen[1] == seen[2] == seen[5] == seen[6]
    assert (seen[3] == seen[2]) == bool(world.rank)


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_a_bucket_is_elsewhere_on_the_rank_that_keeps_while_it_keeps(kind: str) -> None:
    run_world(kind, one_keeps, 2)


def reuses(world: World) -> None:
    for options in MODELS.values():
        model, seen = wrapped(world, options), []
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            step(model, 1.0, options)
            ec.clip_grad_norm_(model, 1.0)
            optimizer.step()
            seen.append([p.grad.data_ptr() for p in model.parameters()])
        assert seen[1] == seen[2] == seen[3]


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_the_memory_of_gradients_that_nobody_keeps_is_used_again(kind: str) -> None:
    run_world(kind, reuses, 2)


def stays(world: World) -> None:
    for options in MODELS.values():
        model = wrapped(world, options)
        step(model, 1.0, options)
        model.zero_grad()
        step(model, 3.0, options)
        kept = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=False)
        step(model, 3.0, options)
        assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))


def test_gradients_that_are_not_dropped_are_added_to_in_place() -> None:
    ec.run(stays, 2)


def leaves(world: World) -> None:
    model = wrapped(world, {})
    kept, copies = [], []
    with model.join():
        for i in range(4 if world.rank else 2):
            model.zero_grad()
            step(model, i + 1.0, {})
            kept += [p.grad for p in model.parameters()]
            copies += [grad.clone() for grad in kept[len(copies) :]]
    assert all(map(torch.equal, kept, copies))


def test_a_rank_without_batches_keeps_its_gradients_too() -> None:
    ec.run(leaves, 2)


def inside(world: World) -> None:
    plan = ec.Plan(pp=2, dp=2, microbatches=2)
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = ec.parallelize(stages, plan, world, loss_fn=nn.functional.mse_loss)
    kept, copies = [], []
    for i in range(4):
        pipe.zero_grad()
        pipe.step(torch.full((4, 4), i + 1.0), target=torch.zeros(4, 4))
        kept += [p.grad for p in pipe.parameters()]
        copies += [grad.clone() for grad in kept[len(copies) :]]
    assert all(map(torch.equal, kept, copies))


def test_stages_of_a_pipeline_let_kept_gradients_be() -> None:
    ec.run(inside, 4)
