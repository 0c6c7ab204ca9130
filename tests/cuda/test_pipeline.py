"""Pipelines: schedules of one and of several stages for each rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from tests.cuda.training import (
    RANKS,
    STEPS,
    assert_trained,
    batch,
    build,
    on_one_rank,
    optimizer_of,
)

# Schedule, stages for each rank.
CASES = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved": ("interleaved", 2),
    "zb-h1": ("zb-h1", 1),
    "zb-v": ("zb-v", 2),
}


class Stage(nn.Sequential):
    """Some layers of the whole model, under the names that they have in it."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def stages_of(device: torch.device, count: int) -> list[nn.Module]:
    """The whole model in so many stages."""
    layers = list(build(device).named_children())
    cuts = [round(i * len(layers) / count) for i in range(count + 1)]
    return [Stage(dict(layers[a:b])) for a, b in pairwise(cuts)]


def trained(
    world: ec.World, schedule: str, chunks: int, microbatches: int = 4, **options: Any
) -> dict[str, Tensor]:
    """The state of this rank's stages after some steps on the batches of two ranks."""
    pipe = ec.Pipeline(
        stages_of(world.device, world.size * chunks),
        world.group,
        microbatches=microbatches,
        schedule=schedule,
        loss_fn=F.mse_loss,
        **options,
    )
    optimizer = optimizer_of(pipe)
    for step in range(STEPS):
        columns = zip(*(batch(step, rank) for rank in range(RANKS)), strict=True)
        inputs, targets = (torch.cat(column).to(world.device) for column in columns)
        pipe.step(inputs, target=targets)
        ec.clip_grad_norm_(pipe, 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return {name.partition(".")[2]: value for name, value in pipe.state_dict().items()}


def test_training_equals_one_process(device: str, case: tuple[str, int]) -> None:
    parts = ec.run(lambda world: trained(world, *case), RANKS, device=device)
    assert_trained({name: value for part in parts for name, value in part.items()}, RANKS)


def test_recomputing_stages_equal_one_process(device: str) -> None:
    parts = ec.run(lambda world: trained(world, "1f1b", 1, recompute=True), RANKS, device=device)
    assert_trained({name: value for part in parts for name, value in part.items()}, RANKS)


def test_one_rank_with_one_stage_equals_one_process(device: str) -> None:
    assert_trained(on_one_rank(device, lambda world: trained(world, "1f1b", 1)), RANKS)
