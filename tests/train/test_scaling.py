"""One rank finds a gradient that is not finite, and all skip the step."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm import streams
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError
from tests import reference
from tests.worlds import KINDS, run_world

WIDTH = 6


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))


def wrapped(world: World, how: str, **precision: Any) -> nn.Module:
    if how == "DDP":
        return ec.DDP(plain(), world.group)
    precision = {"compute": torch.float16, "reduce": torch.float32, **precision}
    return ec.FSDP(
        plain(),
        world.group,
        units=ec.units.by_type(nn.Linear),
        min_num_params=0,
        precision=ec.MixedPrecision(**precision),
    )


def batch(step: int, rank: int) -> Tensor:
    return reference.rows(rank, 3, WIDTH, step=step, dtype=torch.float32)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


def trains(world: World, how: str, optimizer_options: dict[str, Any]) -> list[float]:
    """Rank 1 sees an infinite input in the second of three steps; returns the scales."""
    model, expected = wrapped(world, how), plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **optimizer_options)
    plain_optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
    scaler = ec.GradScaler(world.group, init_scale=256.0)
    scales = []
    for step in range(3):
        before, skipped = weights(model), step == 1
        x = batch(step, world.rank)
        if skipped and world.rank == 1:
            x[0, 0] = float("inf")
        scaler.scale(model(x).float().square().mean()).backward()
        if step == 2:
            scaler.unscale_(optimizer)
            ec.clip_grad_norm_(model, 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = weights(model)
        assert same(before, after) == skipped
        everyone = world.group.all_gather_object({n: v.tolist() for n, v in after.items()})
        assert all(results == everyone[0] for results in everyone)
        if not skipped:
            expected(
                torch.cat([batch(step, r) for r in range(world.size)])
            ).square().mean().backward()
            if step == 2:
                nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
    for name, value in expected.state_dict().items():
        # Gradients of float16 have three digits, and AdamW divides them by their own size.
        torch.testing.assert_close(after[name], value, rtol=0, atol=2e-3)
    return scales


def trains_all(world: World) -> None:
    for how, options in (("FSDP", {}), ("FSDP", {"fused": True}), ("DDP", {})):
        assert trains(world, how, options) == [256.0, 128.0, 128.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_skip_the_step_of_one_infinite_input_and_then_train_on(kind: str) -> None:
    run_world(kind, trains_all, 2)


def one_owner(world: World) -> tuple[bool, float]:
    """Only rank 1's part of one gradient is not finite; this is what torch's own cannot see."""
    model = wrapped(world, "FSDP")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = ec.GradScaler(world.group, init_scale=4.0)
    scaler.scale(model(batch(0, world.rank)).float().sum()).backward()
    if world.rank == 1:
        parts = [ec.local_shard(p.grad) for p in model.parameters()]
        next(part for part in parts if part.numel())[0] = float("nan")
    before = weights(model)
    scaler.step(optimizer)
    scaler.update()
    return same(before, weights(model)), scaler.get_scale()


def test_a_gradient_that_is_not_finite_on_its_owner_only_stops_all() -> None:
    assert ec.run(one_owner, 3) == [(True, 2.0)] * 3


def without_gradients(world: World) -> tuple[float, float]:
    used = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([used], lr=1.0)
    scaler = ec.GradScaler(world.group, init_scale=4.0)
    loss = scaler.scale(used.sum())
    if world.rank == 0:
        loss.backward()
    scaler.step(optimizer)
    scaler.update()
    return used.item(), scaler.get_scale()


def test_a_rank_without_gradients_agrees_with_the_others() -> None:
    assert ec.run(without_gradients, 2) == [(0.0, 4.0), (1.0, 4.0)]


def keeps_half(world: World) -> None:
    model = wrapped(world, "FSDP", reduce=torch.float16, keep_low_precision_grads=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = ec.GradScaler(world.group, init_scale=4.0)
    scaler.scale(model(batch(0, world.rank)).float().sum()).backward()
    grads = [copy.deepcopy(p.grad) for p in model.parameters()]
    scaler.unscale_(optimizer)
    for old, param in zip(grads, model.parameters(), strict=True):
        assert param.grad.dtype == torch.float16
        assert torch.equal(param.grad * 4, old)


def test_float16_gradients_that_were_kept_are_unscaled() -> None:
    ec.run(keeps_half, 2)


def off(world: World) -> bool:
    scaler = ec.GradScaler(world.group, enabled=False)
    return scaler.scale(torch.ones(1)).item() == 1.0 and not scaler.is_enabled()


def test_a_scaler_can_be_switched_off() -> None:
    assert ec.run(off, 1) == [True]
    with pytest.raises(ArgumentError, match="group is 'cpu'; give a Group"):
        ec.GradScaler("cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("device", value) for value in ("gpus", 7, ["cpu"])),
        *(("init_scale", value) for value in (None, "8", 0.0, -8.0, math.nan, math.inf, 1e39)),
        *(("growth_factor", value) for value in (None, "2", 1.0, 0.5, math.nan, math.inf)),
        *(("backoff_factor", value) for value in (None, "2", 1.0, 0.0, -1.0, math.nan)),
        *(("growth_interval", value) for value in (None, 0, -1, 1.5, "2")),
        *(("enabled", value) for value in (None, 1, "no")),
    ],
)
def test_a_number_that_cannot_scale_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        ec.run(lambda world: ec.GradScaler(world.group, **{name: value}), 1)


@pytest.mark.parametrize("name", ["init_scale", "growth_interval", "enabled"])
def test_ranks_with_other_scales_are_told_before_they_train(name: str) -> None:
    values: dict[str, list[Any]] = {
        "init_scale": [8.0, 16.0],
        "growth_interval": [10, 20],
        "enabled": [True, False],
    }
    with pytest.raises(ec.StartMismatch, match=f"option {name} of GradScaler is not the same"):
        ec.run(lambda world: ec.GradScaler(world.group, **{name: values[name][world.rank]}), 2)


def scales_in_a_pipeline(world: World) -> list[Tensor]:
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    scaler = ec.GradScaler(world.group, init_scale=256.0)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = scaler.scale(nn.functional.mse_loss(output, target))
        assert isinstance(loss, Tensor)
        return loss

    model = ec.Pipeline(stages, world.group, microbatches=2, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.full((4, WIDTH), math.inf) if step == 1 else batch(step, 0)[:2].repeat(2, 1)
        model.step(x, target=torch.zeros(4, WIDTH))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 128.0
    state = model.whole_state_dict(rank0_only=False)
    return list(state.values())


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_pipeline_only_the_rank_of_the_last_stage_scales(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (0, 2):
        x = batch(step, 0)[:2].repeat(2, 1)
        nn.functional.mse_loss(model(x), torch.zeros(4, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values in run_world(kind, scales_in_a_pipeline, 2):
        for value, expected in zip(values, model.state_dict().values(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def never_scales(world: World) -> None:
    model = wrapped(world, "DDP")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ec.GradScaler(world.group)
    model(batch(0, world.rank)).square().mean().backward()
    with pytest.raises(StateError, match="no rank has scaled a loss"):
        scaler.step(optimizer)


def test_a_loss_that_no_rank_has_scaled_is_told() -> None:
    ec.run(never_scales, 2)


class CountsNumbers(streams.PlainDevice):
    """A device that counts the tensors of numbers that it is given without a wait."""

    count = 0

    def numbers(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        CountsNumbers.count += 1
        return super().numbers(values, dtype)


def test_a_step_of_the_scaler_gives_the_device_its_flags_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(streams.kinds, "cpu", CountsNumbers)

    def main(world: World) -> None:
        model = ec.DDP(nn.Linear(2, 1), world.group)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), ec.GradScaler(world.group)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        before = CountsNumbers.count
        scaler.step(optimizer)
        assert CountsNumbers.count == before + 1

    ec.run(main, 1)
