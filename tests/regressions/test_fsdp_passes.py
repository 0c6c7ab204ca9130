"""Passes of FSDP that raise on all ranks, or that other ranks overtake."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests import reference
from tests.worlds import KINDS, events_of, run_world

WIDTH = 4


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError("in backward")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, fails: str | None) -> Tensor:
        if fails == "forward":
            raise ValueError("in forward")
        x = x + torch.tanh(self.linear(x))
        return Fails.apply(x) if fails == "backward" else x  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(
        self, x: Tensor, used: Sequence[int] = (0, 1, 2), fails: tuple[int, str] | None = None
    ) -> Tensor:
        x = self.first(x)
        for i in used:
            x = self.blocks[i](x, fails[1] if fails is not None and fails[0] == i else None)
        return x.square().mean()


def rows(rank: int) -> Tensor:
    return reference.rows(rank, 3, WIDTH, dtype=torch.float32)


def build(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def fails_between(world: ec.World) -> None:
    """A forward that fails, between a forward in which ranks skip units and its backward."""
    model, plain = build(torch.float64), build(torch.float64)
    wrapped = ec.FSDP(model, world.group, units=ec.units.by_type(Block), min_num_params=0)
    used = [[0, 1], [0, 1, 2]]
    for _ in range(2):
        wrapped(rows(0).double()).backward()
    wrapped.zero_grad()
    loss = wrapped(rows(world.rank).double(), used[world.rank])
    with pytest.raises(ValueError, match="in forward"):
        wrapped(rows(world.rank).double(), [0], (0, "forward"))
    loss.backward()
    for rank in range(world.size):
        (plain(rows(rank).double(), used[rank]) / world.size).backward()
    for param, expected in zip(wrapped.unwrap().parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_fails_does_not_change_the_backward_of_an_earlier_one(kind: str) -> None:
    run_world(kind, fails_between, 2, timeout=20)


def goes_on(world: ec.World) -> None:
    precisions = (None, ec.MixedPrecision(compute=torch.bfloat16))
    strategies = (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP)
    for precision in precisions:
        for strategy in strategies:
            for where in ("forward", "backward"):
                options: dict[str, Any] = {"precision": precision, "strategy": strategy}
                options |= {"units": ec.units.by_type(Block), "min_num_params": 0}
                failed = ec.FSDP(build(torch.float32), world.group, **options)
                other = ec.FSDP(build(torch.float32), world.group, **options)
                with pytest.raises(ValueError, match="in "):
                    failed(rows(world.rank), (0, 1, 2), (1, where)).backward()
                failed.zero_grad()
                for model in (failed, other):
                    model(rows(world.rank)).backward()
                for one, expected in zip(failed.parameters(), other.parameters(), strict=True):
                    assert one.grad is not None
                    assert expected.grad is not None
                    assert torch.equal(one.grad.detach(), expected.grad.detach())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_after_a_pass_that_failed_on_all_ranks(kind: str) -> None:
    run_world(kind, goes_on, 2, timeout=20)


# No rank writes its parts while another one is in a forward that no reduction follows -------------


class Late(nn.Module):
    """The identity; the last rank takes long for it."""

    def __init__(self, world: ec.World) -> None:
        super().__init__()
        self.is_late = world.rank == world.size - 1

    def forward(self, x: Tensor) -> Tensor:
        if self.is_late:
            time.sleep(0.1)
        return x


def with_a_late_layer(world: ec.World) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2, dtype=torch.float64) for _ in range(3)]
    return nn.Sequential(layers[0], Late(world), *layers[1:])


def kept_forward(model: ec.FSDP, x: Tensor) -> Tensor:
    return model(x).sum()


def kept_backward(model: ec.FSDP, x: Tensor) -> Tensor:
    with model.no_sync():
        loss = model(x).sum()
        loss.backward()
    return loss


def failed_backward(model: ec.FSDP, x: Tensor) -> Tensor:
    output = model(x)

    def fail(grad: Tensor) -> None:
        raise KeyError("no backward today")

    output.register_hook(fail)
    with pytest.raises(KeyError):
        output.sum().backward()
    return output.sum()


def forward_then_write(world: ec.World, offload: ec.Offload) -> None:
    units = ec.units.by_type(nn.Linear)
    x = torch.ones(1, 2, dtype=torch.float64)
    for forward in (kept_forward, kept_backward, failed_backward):
        for writes in ("step", "load"):
            late = with_a_late_layer(world)
            model = ec.FSDP(late, world.group, units=units, min_num_params=0, offload=offload)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            zeros = {name: 0 * value for name, value in model.state_dict().items()}
            with torch.no_grad():
                expected = model(x).sum()
            model(x).sum().backward()
            assert torch.equal(forward(model, x), expected), (forward, writes)
            if writes == "step" and forward is kept_backward:
                with pytest.raises(ec.StateError, match="not reduced yet"):
                    optimizer.step()
            elif writes == "step":
                optimizer.step()
            else:
                model.load_state_dict(zeros)


@pytest.mark.slow
@pytest.mark.parametrize("offload", [ec.Offload.NONE, ec.Offload.ALL])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_step_or_a_load_waits_for_the_forwards_of_other_ranks(kind, offload) -> None:
    run_world(kind, forward_then_write, 2, (offload,))


def train_many(world: ec.World) -> int:
    """How many barriers a usual step has."""
    model = ec.FSDP(with_a_late_layer(world), world.group, min_num_params=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with events_of(world.rank, "collective.issue") as calls:
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return sum(call.facts["op"] == "barrier" for call in calls)


def test_a_step_after_a_reduction_waits_for_nobody() -> None:
    assert ec.run(train_many, 2) == [1, 1]
