"""Stages that a step does not train, and weights that are computed at each call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import echelon as ec
from tests.reference import assert_states_close, train_alone
from tests.worlds import run_world

WIDTH, ROWS = 4, 4


class Cold(nn.Module):
    """Nothing of it gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).detach()


class Sometimes(Cold):
    """Trains its layer only where the data says so, so replicas differ."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.mean() > 0 else self.linear(x)


class Scale(nn.Module):
    """Has nothing whose gradient can be put off."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def normed() -> nn.Module:
    return weight_norm(nn.Linear(WIDTH, WIDTH))


FIRST: list[Callable[[], nn.Module]] = [Cold, Sometimes, Scale, normed]
AXES: list[dict[str, Any]] = [{"dp": 2}, {"shard": 2, "fsdp": {"min_num_params": 0}}]
HOW = [("1f1b", "step"), ("1f1b", "microbatch"), ("zb-h1", "step"), ("zb-h1", "microbatch")]
STEPS = 2


def stages(first: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [first().double(), nn.Linear(WIDTH, WIDTH).double()]


def data(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7 * step + replica)
    x, y = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def train(world: ec.World) -> list[dict[str, Tensor]]:
    found = []
    for first in FIRST:
        for axes in AXES:
            for schedule, every in HOW:
                plan = ec.Plan(
                    pp=2,
                    microbatches=2,
                    schedule=schedule,
                    pipeline={"reduce_every": every},
                    **axes,
                )
                loss_fn = nn.functional.mse_loss
                pipe = ec.parallelize(stages(first), plan, world, loss_fn=loss_fn)
                replica = world.rank % 2
                optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
                for step in range(STEPS):
                    x, y = data(step, replica)
                    pipe.step(x, target=y)
                    optimizer.step()
                    optimizer.zero_grad()
                found.append({k: v.clone() for k, v in pipe.whole_state_dict().items()})
    return found


def of_one_process(first: Callable[[], nn.Module]) -> dict[str, Tensor]:
    model = nn.Sequential(*copy.deepcopy(stages(first)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(step: int) -> Iterator[Tensor]:
        for replica in range(2):
            x, y = data(step, replica)
            for half in range(2):
                rows = slice(half * 2, half * 2 + 2)
                yield nn.functional.mse_loss(model(x[rows]), y[rows]) / 4

    return train_alone(model, optimizer, STEPS, losses)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_stage_that_a_step_does_not_train_takes_part_with_nothing(kind: str) -> None:
    expected = [of_one_process(first) for first in FIRST for _ in AXES for _ in HOW]
    for states in run_world(kind, train, 4):
        for state, wanted in zip(states, expected, strict=True):
            assert_states_close(state, wanted, rtol=1e-11, atol=1e-12)
