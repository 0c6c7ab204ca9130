"""FSDP: every strategy, offload and layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import echelon as ec
from tests.cuda.training import (
    STEPS,
    Block,
    assert_trained,
    batch_on,
    build,
    on_all,
    optimizer_of,
    train,
)


@dataclass(frozen=True)
class Case:
    """Options of FSDP."""

    options: dict[str, Any] = field(default_factory=dict)

    def wrap(self, world: ec.World, **more: Any) -> ec.FSDP:
        return ec.FSDP(
            build(world.device),
            more.pop("group", world.group),
            units=ec.units.by_type(Block),
            min_num_params=0,
            **{**self.options, **more},
        )


_SHARDED = [strategy for strategy in ec.Strategy if not strategy.hybrid]
_NEVER = (ec.Strategy.NO_SHARD, ec.Offload.ALL)  # refused: nothing would be left on the device
CASES = {
    f"{strategy.name} {offload.name} {layout}": Case(
        {"strategy": strategy, "offload": offload, "layout": layout}
    )
    for strategy, offload, layout in product(_SHARDED, ec.Offload, ("flat", "rows"))
    if (strategy, offload) != _NEVER and (strategy, layout) != (ec.Strategy.NO_SHARD, "rows")
} | {
    "forward prefetch": Case({"forward_prefetch": 2}),
    "no limit of gathers": Case({"limit_all_gathers": False}),
    "flat parameters": Case({"use_orig_params": False}),
}


def test_training_equals_one_process(device: str, case: Case) -> None:
    def main(world: ec.World) -> dict[str, Tensor]:
        model = case.wrap(world)
        train(model, world)
        if "offload" in case.options and case.options["offload"] is ec.Offload.NONE:
            assert {p.device.type for p in model.parameters()} == {world.device.type}
        return model.whole_state_dict()

    for ranks, state in on_all(device, main):
        assert_trained(state, ranks)


def test_hybrid_strategies_equal_one_process(device: str) -> None:
    def main(world: ec.World) -> list[dict[str, Tensor]]:
        mesh = world.mesh(replicate=2, shard=2)
        states = []
        for strategy in (s for s in ec.Strategy if s.hybrid):
            model = Case().wrap(
                world, group=mesh["shard"], replicate=mesh["replicate"], strategy=strategy
            )
            train(model, world)
            states.append(model.whole_state_dict())
        return states

    for states in ec.run(main, 4, device=device):
        for state in states:
            assert_trained(state, 4)


def test_accumulation_without_sync_equals_one_backward(device: str) -> None:
    def main(world: ec.World) -> dict[str, Tensor]:
        model = Case().wrap(world)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            inputs, targets = batch_on(world.device, step, world.rank)
            with model.no_sync():
                (F.mse_loss(model(inputs[:2]), targets[:2]) / 2).backward()
            (F.mse_loss(model(inputs[2:]), targets[2:]) / 2).backward()
            ec.clip_grad_norm_(model, 0.3)
            optimizer.step()
            optimizer.zero_grad()
        return model.whole_state_dict()

    for ranks, state in on_all(device, main):
        assert_trained(state, ranks)


def test_in_bfloat16_the_loss_falls_and_shards_stay_in_float32(device: str) -> None:
    precision = ec.MixedPrecision(compute=torch.bfloat16, reduce=torch.float32)

    def main(world: ec.World) -> list[float]:
        model = ec.FSDP(
            build(world.device).float(),
            world.group,
            units=ec.units.by_type(Block),
            min_num_params=0,
            precision=precision,
        )
        optimizer = optimizer_of(model)
        inputs, targets = (part.float() for part in batch_on(world.device, 0, world.rank))
        losses = []
        for _ in range(20):
            loss = F.mse_loss(model(inputs).float(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        return losses

    for _, losses in on_all(device, main):
        assert losses[-1] < losses[0] / 2
