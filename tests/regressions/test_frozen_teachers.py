"""A model that is wholly frozen, such as a large teacher or a reference model, is sharded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.worlds import run_world

STEPS = 3


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4)).double()


def rows(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def loss_of(student: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
    """Gradients come to the student beside the teacher, and also through it."""
    with torch.no_grad():
        wanted = teacher(x)
    answer = student(x)
    return (answer - wanted).square().mean() + teacher(answer).square().mean()


def distil(world: ec.World, strategy: ec.Strategy) -> dict[str, Tensor]:
    units = ec.units.by_type(nn.Linear)
    frozen = net(1).requires_grad_(False)
    teacher = ec.FSDP(frozen, world.group, units=units, strategy=strategy, min_num_params=0)
    student = ec.FSDP(net(0), world.group, units=units, min_num_params=0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
    for step in range(STEPS):
        loss_of(student, teacher, rows(step, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(param.grad is None for param in teacher.parameters())
    for name, value in net(1).state_dict().items():
        assert torch.equal(teacher.state_dict()[name], value)
    if strategy is ec.Strategy.FULL_SHARD and world.size > 1:
        whole = sum(param.nbytes for param in net(1).parameters())
        assert teacher.memory_stats().shards < whole
    return student.state_dict()


def distil_all(world: ec.World) -> list[dict[str, Tensor]]:
    strategies = (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP, ec.Strategy.NO_SHARD)
    return [distil(world, one) for one in strategies]


@pytest.mark.parametrize(
    ("kind", "ranks"), [("threads", 1), ("threads", 3), ("processes", 2), ("gloo", 2)]
)
def test_a_teacher_is_sharded_over(kind: str, ranks: int) -> None:
    teacher, student = net(1).requires_grad_(False), net(0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(ranks):
            (loss_of(student, teacher, rows(step, rank)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    for states in run_world(kind, distil_all, ranks):
        for state in states:
            for name, value in student.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=name)


def thaw(world: ec.World) -> None:
    model = ec.FSDP(net(1).requires_grad_(False), world.group)
    model.module.requires_grad_(True)
    model(rows(0, 0))


def test_a_teacher_that_is_thawed_is_refused_before_the_step() -> None:
    with pytest.raises(ec.StateError, match="was frozen, and unfrozen"):
        run_world("threads", thaw, 2)
