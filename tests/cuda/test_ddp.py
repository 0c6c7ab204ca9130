"""DDP: its ways to reduce."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

import echelon as ec
from tests.cuda.training import (
    STEPS,
    assert_trained,
    batch_on,
    build,
    on_all,
    optimizer_of,
    train,
)

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small buckets": {"bucket_bytes": 256, "first_bucket_bytes": 64},
    "verified start": {"init": "verify"},
}


def test_training_equals_one_process(device: str, case: dict[str, Any]) -> None:
    def main(world: ec.World) -> dict[str, Tensor]:
        model = ec.DDP(build(world.device), world.group, **case)
        train(model, world)
        assert {p.device.type for p in model.parameters()} == {world.device.type}
        return {name: value.clone() for name, value in model.state_dict().items()}

    for ranks, state in on_all(device, main):
        assert_trained(state, ranks)


def test_gradients_that_are_reduced_on_request_equal_one_process(device: str) -> None:
    def main(world: ec.World) -> dict[str, Tensor]:
        model = ec.DDP(build(world.device), world.group, sync="manual")
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            inputs, targets = batch_on(world.device, step, world.rank)
            (F.mse_loss(model(inputs[:2]), targets[:2]) / 2).backward()
            (F.mse_loss(model(inputs[2:]), targets[2:]) / 2).backward()
            model.sync_gradients()
            ec.clip_grad_norm_(model, 0.3)
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    for ranks, state in on_all(device, main):
        assert_trained(state, ranks)
