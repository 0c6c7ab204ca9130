"""Gradients that a user keeps over ``zero_grad()`` keep their values, as in plain torch."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
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

# What becomes of gradients after each step, or whether it is one under ``no_sync``.
WAYS_TO_GO_ON = [
    ["zero"] * 6,
    ["kept"] * 6,
    ["dropped"] * 6,
    ["kept", "local", "zero", "local", "kept", "zero", "dropped", "zero"],
]


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


def clip_by_replacing(params: Iterable[nn.Parameter]) -> None:
    """An old idiom: the tensor stays ``.grad``, and gets other memory."""
    for param in params:
        if param.grad is not None:
            param.grad.data = param.grad.data / (1 + param.grad.norm())


class Gated(nn.Module):
    """Two layers; one may be left out. A hook clips the other while the backward runs."""

    def __init__(self, clips: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
        self.clips = clips

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        if use:
            x = self.first(x)
        output: Tensor = self.second(x)
        if self.clips and x.grad_fn is not None:
            last = list(self.second.parameters())[:1]  # whose gradient is there before that of x
            x.register_hook(lambda grad: clip_by_replacing(last))
        return output


def trained(model: Any, rank: int | None, ways: Sequence[str], options: dict[str, Any]) -> Any:
    """The weights after steps with other memory; ``ways`` say what becomes of the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for step, way in enumerate(ways):
        x = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
        is_local = way == "local" and rank is not None
        with model.no_sync() if is_local else contextlib.nullcontext():
            batch = x.flatten(0, 1) if rank is None else x[rank]
            model(batch, use=step % 3 != 1).square().mean().backward()
        if options.get("sync") == "manual" and not is_local and rank is not None:
            model.sync_gradients()
        if way == "local":
            continue
        clip_by_replacing(model.parameters())
        optimizer.step()
        if way != "kept":
            optimizer.zero_grad(set_to_none=way == "dropped")
    return list(model.parameters())


def other_memory(world: World) -> None:
    choices = [options for options in MODELS.values() if "reduction" not in options]
    for options, ways in itertools.product(choices, WAYS_TO_GO_ON):
        model = ec.DDP(Gated(clips=False), world.group, **options)
        expected = trained(Gated(clips=False), None, ways, options)
        torch.testing.assert_close(trained(model, world.rank, ways, options), expected)


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_gradients_that_were_given_other_memory_are_reduced(kind: str) -> None:
    run_world(kind, other_memory, 2)


@pytest.mark.parametrize("use", [True, False], ids=["used", "unused"])
def test_a_gradient_that_gets_other_memory_while_backward_runs_is_reduced(use: bool) -> None:
    def gradients(model: Any, rank: int) -> list[Tensor]:
        for step in range(5):
            x = torch.full((4, 3), 0.1 * (step + 1) * (rank - 3), dtype=torch.float64)
            is_local = step in (1, 3)  # the sum lies in the bucket, and the next backward clips it
            if step != 4:
                model.zero_grad(set_to_none=False)
            with (
                model.no_sync()
                if is_local and isinstance(model, ec.DDP)
                else contextlib.nullcontext()
            ):
                model(x.requires_grad_() * 1, use).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def main(world: World) -> None:
        of_ranks = zip(*(gradients(Gated(clips=True), rank) for rank in range(2)), strict=True)
        expected = [(a + b) / 2 for a, b in of_ranks]
        for options in ({}, {"gradient_dtype": torch.float32}):
            model = ec.DDP(Gated(clips=True), world.group, **options)
            for got, want in zip(gradients(model, world.rank), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)

    ec.run(main, 2)


def one_gradient_of_other_memory(world: World) -> None:
    for options in MODELS.values():
        model = wrapped(world, options)
        for _ in range(2):  # buckets are made anew in the second one
            step(model, 1.0, options)
        addresses = [p.grad.data_ptr() for p in model.parameters()]
        weight = model.module[0].weight
        kept, weight.grad.data = weight.grad, torch.full_like(weight, 7.0)
        model.zero_grad()
        for factor in (1.0, 3.0):
            model.zero_grad(set_to_none=False)
            step(model, factor, options)
        assert bool((kept == 7).all())
        kept = None
        model.zero_grad()
        for _ in range(2):  # a second one, in which memory that was held may be used again
            step(model, 1.0, options)
            model.zero_grad(set_to_none=False)
        assert [p.grad.data_ptr() for p in model.parameters()] == addresses


def test_a_gradient_of_other_memory_is_kept_over_zero_grad_and_the_bucket_stays() -> None:
    ec.run(one_gradient_of_other_memory, 2)


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
