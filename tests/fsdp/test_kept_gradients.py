"""Gradients that a user keeps over ``zero_grad()`` keep their values, as in plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World

# How somebody holds a gradient, and what shows its values then.
WAYS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "itself": (lambda grad: grad, ec.local_shard),
    "a part": (ec.local_shard, lambda part: part),
    "a view": (lambda grad: ec.local_shard(grad).flatten()[:1], lambda view: view),
    "an array": (lambda grad: ec.local_shard(grad).numpy(), torch.from_numpy),
}
MODELS = {
    "flat": {},
    "rows": {"layout": "rows"},
    "flat parameters": {"use_orig_params": False},
    "rounded": {"precision": ec.MixedPrecision(master=torch.float32, reduce=torch.float64)},
    "replicated": {"strategy": ec.Strategy.NO_SHARD},
}
HYBRID = {one.name: {"strategy": one} for one in ec.Strategy if one.hybrid}


def wrapped(world: World, options: dict[str, Any]) -> ec.FSDP:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2))
    units = ec.units.by_type(nn.Linear)
    mesh = world.mesh(replicate=2, shard=2) if world.size == 4 else None
    if mesh is not None:
        options = {"replicate": mesh["replicate"], **options}
    group = world.group if mesh is None else mesh["shard"]
    return ec.FSDP(module, group, units=units, **{"min_num_params": 0, **options})


def addresses(model: ec.FSDP) -> list[int]:
    return [ec.local_shard(p.grad).data_ptr() for p in model.parameters()]


def keeps(world: World) -> None:
    for options in MODELS.values() if world.size == 2 else HYBRID.values():
        for hold, values in WAYS.values():
            model, kept, copies = wrapped(world, options), [], []
            for factor in (1.0, -3.0, 5.0):
                model.zero_grad()
                (model(torch.ones(2, 8)).sum() * factor).backward()
                kept += [hold(p.grad) for p in model.parameters()]
                copies += [values(held).clone() for held in kept[len(copies) :]]
            assert all(torch.equal(values(a), b) for a, b in zip(kept, copies, strict=True))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_gradients_that_are_kept_over_zero_grad_keep_their_values(kind: str) -> None:
    ec.run(keeps, 2, kind)


def test_replicas_of_shards_let_kept_gradients_be() -> None:
    ec.run(keeps, 4)


def reuses(world: World) -> None:
    for options in MODELS.values():
        model, seen = wrapped(world, options), []
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            ec.clip_grad_norm_(model, 1.0)
            optimizer.step()
            seen.append(addresses(model))
        assert seen[0] == seen[1] == seen[2]


def test_the_memory_of_gradients_that_nobody_keeps_is_used_again() -> None:
    ec.run(reuses, 2)


def accumulates(world: World) -> None:
    model = wrapped(world, {})
    first, second = (module.weight for module in model.module)
    model(torch.ones(2, 8)).sum().backward()
    kept = ec.local_shard(first.grad)
    model(torch.ones(2, 8)).sum().backward()
    assert torch.equal(kept, ec.local_shard(first.grad))  # as torch does, in place
    kept, before = second.grad, ec.local_shard(second.grad).clone()
    second.grad = None
    sum_before = ec.local_shard(model.module[1].bias.grad).clone()
    model(torch.ones(2, 8)).sum().backward()
    assert torch.equal(ec.local_shard(kept), before)
    assert torch.equal(ec.local_shard(second.grad), before / 2)
    assert torch.equal(ec.local_shard(model.module[1].bias.grad), sum_before * 1.5)


def test_only_a_gradient_that_was_dropped_gets_new_memory() -> None:
    ec.run(accumulates, 2)
