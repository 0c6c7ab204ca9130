"""Law *Same bits* for pipelines: in each run and in each world, on every schedule."""

import functools
import hashlib
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from tests.pipeline.models import batch, build, mse
from tests.pipeline.sizes import TRAINING, VARIANTS
from tests.pipeline.test_api import Embedding, Head
from tests.worlds import KINDS, NCCL_RULES, run_world

MICROBATCHES = 4
TIED = "a shared parameter"


def digest(pipe: ec.Pipeline, loss: torch.Tensor) -> str:
    """Of the loss, and of the parameters and gradients of this rank."""
    found = hashlib.sha256()
    for tensor in [loss, *pipe.parameters(), *(param.grad for param in pipe.parameters())]:
        assert tensor is not None
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def trained(world: World, stages: list[nn.Module], data: Any, loss_fn: Any, **options: Any) -> str:
    pipe = ec.Pipeline(stages, world.group, microbatches=MICROBATCHES, loss_fn=loss_fn, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    x, y = data
    loss = pipe.step(x, target=y, loss_everywhere=True)
    assert loss is not None
    ec.clip_grad_norm_(pipe, 1.0)
    optimizer.step()
    return digest(pipe, loss)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(2 * MICROBATCHES + 1)
    return x.float(), y.float()


def words() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, target = torch.randint(7, (2, 2 * MICROBATCHES + 1), generator=generator)
    return tokens, target


def by_schedule(world: World, variant: str) -> str:
    name, chunks, options = VARIANTS[variant]
    stages = build("nested", world.size * chunks, torch.float32)
    return trained(world, stages, rows(), mse, schedule=name, **options)


def tied(world: World) -> str:
    """A parameter on the first rank and on the last."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(7, 6))
    middle = build("plain", world.size, torch.float32)[1:-1]
    stages = [Embedding(weight), *middle, Head(weight)]
    return trained(world, stages, words(), nn.CrossEntropyLoss())


def digests(world: World) -> dict[str, str]:
    return {name: by_schedule(world, name) for name in TRAINING} | {TIED: tied(world)}


@functools.cache
def found(kind: str, run: int = 0) -> list[dict[str, str]]:
    return run_world(kind, digests, 2)


@pytest.mark.parametrize("name", [*TRAINING, TIED])
@pytest.mark.parametrize("kind", [*KINDS, NCCL_RULES])
def test_all_worlds_give_the_same_bits(kind: str, name: str) -> None:
    assert [mine[name] for mine in found(kind)] == [mine[name] for mine in found("threads", run=1)]


def test_the_law_would_see_another_order_of_microbatches() -> None:
    """GPipe adds gradients up in another order than 1F1B where that makes a difference."""
    assert len({found("threads")[0][name] for name in TRAINING}) > 1
