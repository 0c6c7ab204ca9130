"""DDP: ``sync="manual"`` accumulates as ``sync="overlap"`` does, for every reduction."""

import random

import pytest
import torch
from torch import nn

import echelon as ec
from tests.worlds import run_world

REDUCTIONS = ("mean", "sum", 4.0)
SMALL = {"bucket_bytes": 40, "first_bucket_bytes": 20}

# What happens to the gradients, one after another: s: a backward that is reduced, n: one that is
# not, z: zero_grad(), Z: zero_grad(set_to_none=False), h: half of each, w: weight.grad replaced.
PROGRAMS = ("ss", "sss", "nss", "sns", "nsnns", "sZs", "shs", "snhs", "nhs", "szns", "swns", "sws")


def random_programs(num: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("ssnnzZhw", k=6)) + "s" for _ in range(num)]


def model_of(world: ec.World, sync: str, reduction: float | str) -> ec.DDP:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    with torch.no_grad():
        for param in layers.parameters():
            param.copy_(torch.arange(param.numel()).view_as(param) - 1)
    return ec.DDP(layers, world.group, sync=sync, reduction=reduction, **SMALL)


def backward(model: ec.DDP, rank: int, step: int) -> None:
    rows = torch.tensor([[1.0, step], [rank, 2.0]], dtype=torch.float64)
    model(rows).sum().backward()


def by_hand(model: ec.DDP, op: str, rank: int) -> None:
    if op in "zZ":
        model.zero_grad(set_to_none=op == "z")
    for param in model.parameters() if op == "h" else ():
        if param.grad is not None:
            param.grad.mul_(0.5)
    if op == "w":
        for param in (model.module[0].weight, model.module[1].bias):
            param.grad = torch.full_like(param, 2.0 * rank)


def gradients_of(model: ec.DDP) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def gradients_after_each_reduction(
    world: ec.World, sync: str, reduction: float | str, program: str
) -> list[list[torch.Tensor | None]]:
    model, seen = model_of(world, sync, reduction), []
    for step, op in enumerate(program):
        if op == "n":
            with model.no_sync():
                backward(model, world.rank, step)
        elif op == "s":
            backward(model, world.rank, step)
            if sync == "manual":
                model.sync_gradients()
            seen.append(gradients_of(model))
        else:
            by_hand(model, op, world.rank)
    return seen


def both_ways_agree(world: ec.World, programs: list[str]) -> None:
    for reduction in REDUCTIONS:
        for program in programs:
            manual, overlap = (
                gradients_after_each_reduction(world, sync, reduction, program)
                for sync in ("manual", "overlap")
            )
            # Small whole numbers and divisions by powers of two, so every sum is exact.
            for ours, theirs in zip(manual, overlap, strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    assert (a is None) == (b is None), (reduction, program)
                    assert a is None or torch.equal(a, b), (reduction, program, a, b)


@pytest.mark.slow_for("4")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_those_of_overlap_whatever_comes_between(ranks):
    run_world("threads", both_ways_agree, ranks, ([*PROGRAMS, *random_programs(40)],))


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_gradients_are_those_of_overlap_over(kind):
    run_world(kind, both_ways_agree, 2, (list(PROGRAMS),))


def reduce_again(world: ec.World, reduction: float | str) -> list[list[torch.Tensor | None]]:
    model = model_of(world, "manual", reduction)
    backward(model, world.rank, 0)
    model.sync_gradients()
    before = gradients_of(model)
    model.sync_gradients()
    return [before, gradients_of(model)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_sync_gradients_changes_nothing(reduction):
    for before, after in run_world("threads", reduce_again, 2, (reduction,)):
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a, b)


def write_in_place(world: ec.World, reduction: float | str) -> list[torch.Tensor | None]:
    model = model_of(world, "manual", reduction)
    backward(model, world.rank, 0)
    model.sync_gradients()
    for param in model.parameters():
        param.grad.fill_(world.rank)
    model.sync_gradients()
    return gradients_of(model)


def test_values_written_into_reduced_gradients_are_refused_where_their_meaning_is_unknown():
    with pytest.raises(ec.StateError, match="written into gradients that are reduced already"):
        run_world("threads", write_in_place, 2, ("sum",))
    for grads in run_world("threads", write_in_place, 2, ("mean",)):
        assert all(bool((grad == 0.5).all()) for grad in grads)


def skip_a_batch(world: ec.World, set_to_none: bool) -> list[torch.Tensor | None]:
    model = model_of(world, "manual", "sum")
    backward(model, world.rank, 0)
    model.sync_gradients()
    model.zero_grad(set_to_none=set_to_none)
    if world.rank == 0:
        backward(model, world.rank, 1)
    mine = gradients_of(model)
    model.sync_gradients()
    return [*mine, *gradients_of(model)] if world.rank == 0 else gradients_of(model)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_without_a_batch_adds_nothing(set_to_none):
    first, second = run_world("threads", skip_a_batch, 2, (set_to_none,))
    for mine, ours, theirs in zip(first[:4], first[4:], second, strict=True):
        assert torch.equal(mine, ours)
        assert torch.equal(ours, theirs)


def ask_for_gradients_between(world: ec.World, sync: str) -> list[torch.Tensor | None]:
    model = model_of(world, sync, "sum")
    backward(model, world.rank, 0)
    if sync == "manual":
        model.sync_gradients()
    with model.no_sync():
        torch.autograd.grad(
            model(torch.ones(1, 2, dtype=torch.float64)).sum(), list(model.parameters())
        )
    return gradients_of(model)


def test_autograd_grad_leaves_reduced_gradients_as_they_are():
    manual, overlap = (
        run_world("threads", ask_for_gradients_between, 2, (sync,))[0]
        for sync in ("manual", "overlap")
    )
    expected = run_world("threads", reduce_again, 2, ("sum",))[0][0]
    for a, b, c in zip(manual, overlap, expected, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)
