"""Gradients of DDP: accumulation with ``sync="manual"``, and functions that return None."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def gradients_after_each_reduction(
    world: ec.World, sync: str, reduction: float | str, program: str
) -> list[list[Tensor | None]]:
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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_those_of_overlap_whatever_comes_between(ranks):
    run_world("threads", both_ways_agree, ranks, ([*PROGRAMS, *random_programs(40)],))


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_gradients_are_those_of_overlap_over(kind):
    run_world(kind, both_ways_agree, 2, (list(PROGRAMS),))


def reduce_again(world: ec.World, reduction: float | str) -> list[list[Tensor | None]]:
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


def write_in_place(world: ec.World, reduction: float | str) -> list[Tensor | None]:
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


def skip_a_batch(world: ec.World, set_to_none: bool) -> list[Tensor | None]:
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


def ask_for_gradients_between(world: ec.World, sync: str) -> list[Tensor | None]:
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


# A parameter for which an ``autograd.Function`` returns None has no gradient ----------------------


class Blocked(torch.autograd.Function):
    """The identity; None goes back, and on through everything before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)])

    def forward(self, x: Tensor, blocked: int) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x)
            x = x + (Blocked.apply(y) if i == blocked else y.tanh())
        return x


def loss_of(model: nn.Module, step: int, rank: int, case: str) -> Tensor:
    x = torch.full((2, 3), 1.0 + step + rank, dtype=torch.float64)
    return model(x, step if case == "all" else (step + rank) % 3).square().mean()


def plain(case: str, num_ranks: int) -> list[list[Tensor | None]]:
    found = []
    for step in range(3):
        model = Blocks()
        for rank in range(num_ranks):
            (loss_of(model, step, rank, case) / num_ranks).backward()
        found.append(gradients_of(model))
    return found


def train(world: ec.World, case: str, options: dict[str, Any]) -> list[list[Tensor | None]]:
    model = ec.DDP(Blocks(), world.group, **options)
    found = []
    for step in range(3):
        model.zero_grad()
        loss_of(model, step, world.rank, case).backward()
        if options.get("sync") == "manual":
            model.sync_gradients()
        found.append(gradients_of(model))
    return found


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 0, "first_bucket_bytes": 0},
                                     {"sync": "manual"}])  # fmt: skip
@pytest.mark.parametrize("case", ["all", "by rank"])
def test_it_counts_as_unused(case, options) -> None:
    expected = plain(case, 2)
    for found in ec.run(train, 2, args=(case, options)):
        for steps in zip(found, expected, strict=True):
            for mine, theirs in zip(*steps, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_a_hook_that_came_first_takes_a_gradient_away_when_it_is_reduced() -> None:
    def main(world: ec.World) -> None:
        module = nn.Linear(2, 1)
        module.bias.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        model = ec.DDP(module, world.group)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            assert module.bias.grad is None
            unused = model.unused_parameters()
            assert not unused.here
            assert not unused.everywhere

    ec.run(main, 2)
