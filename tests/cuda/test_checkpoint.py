"""Checkpoints of what lies on a device: saved by one technique, loaded by another."""

from __future__ import annotations

import tempfile
from typing import Any

from torch import Tensor, nn

import echelon as ec
from tests.cuda.training import Block, build, on_all, optimizer_of, train
from tests.reference import assert_states_equal


def fsdp(world: ec.World, **options: Any) -> nn.Module:
    """Wrap a new model."""
    return ec.FSDP(
        build(world.device),
        world.group,
        units=ec.units.by_type(Block),
        min_num_params=0,
        **options,
    )


CASES: dict[str, Any] = {
    "FSDP to DDP": (fsdp, lambda world: ec.DDP(build(world.device), world.group)),
    "DDP to FSDP": (lambda world: ec.DDP(build(world.device), world.group), fsdp),
    "offloaded to FSDP": (lambda world: fsdp(world, offload=ec.Offload.OPTIMIZER), fsdp),
    "FSDP to offloaded rows": (
        fsdp,
        lambda world: fsdp(world, offload=ec.Offload.ALL, layout="rows"),
    ),
}


def whole(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all values, on the CPU."""
    state = model.whole_state_dict() if isinstance(model, ec.FSDP) else model.state_dict()
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def test_a_training_goes_on_as_if_it_had_not_stopped(device: str, case: Any) -> None:
    before, after = case
    with tempfile.TemporaryDirectory() as folder:

        def main(world: ec.World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            at = f"{folder}/{world.size}"
            model = before(world)
            optimizer = train(model, world, steps=1)
            ec.save(at, step=1, model=model, optimizer=optimizer, group=world.group)
            other = after(world)
            fresh = optimizer_of(other)
            ec.load(at, model=other, optimizer=fresh, group=world.group)
            return whole(model), whole(other)

        for _, (saved, loaded) in on_all(device, main):
            assert_states_equal(loaded, saved)


def test_an_asynchronous_save_holds_the_values_of_its_moment(device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def main(world: ec.World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            at = f"{folder}/{world.size}"
            model = fsdp(world)
            optimizer = train(model, world, steps=1)
            saved = whole(model)
            pending = ec.async_save(at, step=1, model=model, optimizer=optimizer, group=world.group)
            train(model, world, steps=1)  # writes over what is being saved
            pending.wait()
            other = fsdp(world)
            ec.load(at, model=other, group=world.group)
            return saved, whole(other)

        for _, (saved, loaded) in on_all(device, main):
            assert_states_equal(loaded, saved)
