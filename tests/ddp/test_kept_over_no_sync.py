"""Gradients that are kept over reductions, while ranks differ in what else they run.

The expected value is arithmetic: what is reduced stays, and a reduction adds what each rank has
added since the last one.
"""

import random

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm import streams
from echelon.errors import StateError
from tests.modules.test_parameters import ReadingWaits

EVENTS = (
    "step", "gated", "no_sync", "no_sync", "attribution", "unused", "sync", "zero", "none",
)  # fmt: skip


class Gate(nn.Module):
    """A layer that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False).double()
        self.second = nn.Linear(3, 2, bias=False).double()

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        return self.first(x) + 2 * self.second(x) if use else x  # the input itself, a leaf


def draw(seed: int, num_ranks: int) -> list[tuple[str, list[bool]]]:
    """Events, and the ranks on which each happens; reductions happen on all."""
    dice = random.Random(seed)
    events = [("step", [True] * num_ranks)]
    for _ in range(12):
        kind = dice.choice(EVENTS)
        everywhere = kind in ("step", "sync", "zero", "none")
        events.append((kind, [everywhere or dice.random() < 0.6 for _ in range(num_ranks)]))
    return [*events, ("step", [True] * num_ranks)]


def played(
    world: ec.World, events: list[tuple[str, list[bool]]], reduction: str | float
) -> list[list[float]]:
    """The gradients after each reduction."""
    model = ec.DDP(Gate(), world.group, reduction=reduction)
    seen = []
    for number, (kind, ranks) in enumerate(events):
        x = torch.full((1, 3), number + world.rank / 7, dtype=torch.float64, requires_grad=True)
        if kind in ("step", "gated"):
            model(x, use=ranks[world.rank]).sum().backward()
        elif kind == "sync":
            model.sync_gradients(may_be_none=True)
        elif kind in ("zero", "none") and ranks[world.rank]:
            model.zero_grad(set_to_none=kind == "none")
        elif ranks[world.rank]:
            if kind == "attribution":
                torch.autograd.grad(model(x).sum(), x)
            else:
                with model.no_sync():
                    model(x, use=kind == "no_sync").sum().backward()
        if kind in ("step", "gated", "sync"):
            seen.append(
                [0.0 if p.grad is None else float(p.grad[1, 2]) for p in model.parameters()]
            )
    return seen


def expected(
    events: list[tuple[str, list[bool]]], reduction: str | float, num_ranks: int
) -> list[list[float]]:
    """What ``played`` returns on every rank."""
    divisor = {"mean": float(num_ranks), "sum": 1.0}.get(reduction, reduction)
    reduced, local, seen = 0.0, [0.0] * num_ranks, []
    for number, (kind, ranks) in enumerate(events):
        if kind in ("zero", "none"):
            reduced, local = 0.0, [0.0] * num_ranks
        for rank in range(num_ranks):
            if ranks[rank] and kind in ("step", "gated", "no_sync"):
                local[rank] += number + rank / 7
        if kind in ("step", "gated", "sync"):
            reduced, local = reduced + sum(local) / divisor, [0.0] * num_ranks
            seen.append([reduced, 2 * reduced])
    return seen


@pytest.mark.parametrize("reduction", ["mean", "sum", 5.0])
def test_ranks_may_differ_in_what_they_add_to_kept_gradients(reduction: str | float) -> None:
    for seed in range(40):
        num_ranks = 2 + seed % 2
        events = draw(seed, num_ranks)
        want = torch.tensor(expected(events, reduction, num_ranks))
        for got in ec.run(played, num_ranks, args=(events, reduction)):
            assert torch.allclose(torch.tensor(got), want, rtol=1e-6), (seed, events)


def test_ranks_that_drop_what_others_keep_get_the_gradients_of_the_others() -> None:
    for seed in range(40):
        num_ranks, dice = 2 + seed % 2, random.Random(seed)
        events = draw(seed, num_ranks)
        for kind, ranks in events:
            if kind == "none":
                ranks[:] = [dice.random() < 0.5 for _ in ranks]
        got = ec.run(played, num_ranks, args=(events, "mean"))
        for other in got[1:]:
            assert torch.allclose(torch.tensor(other), torch.tensor(got[0]), rtol=1e-12), events


def test_one_rank_adds_to_what_one_keeps_and_one_drops() -> None:
    events = [
        ("step", [True] * 3),
        ("no_sync", [True, False, False]),
        ("none", [False, False, True]),
        ("step", [True] * 3),
    ]
    kept, last = 1 / 7, 1 / 7 + (1 + 3 + 3 + 1 / 7 + 3 + 2 / 7) / 3
    for got in ec.run(played, 3, args=(events, "mean")):
        assert got == [pytest.approx([kept, 2 * kept]), pytest.approx([last, 2 * last])]


def test_where_reading_waits_ranks_that_enter_no_sync_look_at_what_the_others_have_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(streams.kinds, "cpu", ReadingWaits)

    def main(world: ec.World) -> float:
        model = ec.DDP(Gate(), world.group, reduction="sum")
        x = torch.full((1, 3), world.rank + 1.0, dtype=torch.float64, requires_grad=True)
        model(x).sum().backward()  # 1 + 2
        with model.no_sync():
            model(10 * x, use=world.rank == 0).sum().backward()  # 10
        model(x).sum().backward()
        grad = model.module.first.weight.grad
        assert grad is not None
        return grad[0, 0].item()

    assert ec.run(main, 2) == [16, 16]


def test_where_reading_waits_ranks_that_keep_other_gradients_refuse_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(streams.kinds, "cpu", ReadingWaits)

    def main(world: ec.World, how: str) -> None:
        model = ec.DDP(Gate(), world.group)
        x = torch.full((1, 3), world.rank + 1.0, dtype=torch.float64)
        model(x).sum().backward()
        if how == "drops" and world.rank == 0:
            model.zero_grad()
        if how == "adds" and world.rank == 0:
            with model.no_sync():
                model(x).sum().backward()
        with pytest.raises(StateError, match="let all ranks call zero_grad"):
            for _ in range(2):
                model(x).sum().backward()

    for how in ("drops", "adds"):
        ec.run(main, 2, args=(how,))
