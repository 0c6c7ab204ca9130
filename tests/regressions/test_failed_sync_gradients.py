"""What a ``sync_gradients()`` leaves that raised: training goes on as if it had not been called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import UnsupportedError
from echelon.fsdp.gradient_reducer import GradientReducer

STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train(wrapped: Any, batch: Callable[[int], Tensor], sync: Callable[[], object]) -> list[Tensor]:
    """The weights after some steps, of which the last is reduced by hand."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for step in range(1, STEPS + 1):
        if step == STEPS and not isinstance(wrapped, nn.Sequential):
            with wrapped.no_sync():
                wrapped(batch(step)).square().mean().backward()
            sync()
        else:
            wrapped(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().clone() for value in wrapped.parameters()]


def of_one_process(size: int) -> list[Tensor]:
    return train(
        model(), lambda step: torch.cat([rows(rank, step) for rank in range(size)]), lambda: None
    )


def under_ddp(world: ec.World) -> list[Tensor]:
    wrapped = ec.DDP(model(), world.group)
    with wrapped.no_sync():
        wrapped(rows(world.rank, 0)).mean().backward()
    weight = next(wrapped.parameters())
    assert weight.grad is not None
    weight.grad = weight.grad.to_sparse()
    with pytest.raises(UnsupportedError, match="DDP reduces dense gradients only"):
        wrapped.sync_gradients()
    wrapped.zero_grad()
    return train(wrapped, lambda step: rows(world.rank, step), wrapped.sync_gradients)


def under_fsdp(world: ec.World) -> list[Tensor]:
    wrapped = ec.FSDP(model(), world.group, min_num_params=0)
    with wrapped.no_sync():
        wrapped(rows(world.rank, 0)).mean().backward()
    with pytest.raises(ConnectionError):
        wrapped.sync_gradients()
    wrapped.zero_grad()
    train(wrapped, lambda step: rows(world.rank, step), wrapped.sync_gradients)
    with wrapped.full_parameters():
        return [value.detach().clone() for value in wrapped.parameters()]


@pytest.mark.parametrize("main", [under_ddp, under_fsdp])
def test_training_goes_on_after_a_call_that_raised(
    main: Callable[[ec.World], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, failed = GradientReducer.finish, set[int]()

    def fails_at_first(self: GradientReducer, *args: Any) -> Any:
        if id(self) not in failed:
            failed.add(id(self))
            raise ConnectionError("the network was gone")
        return finish(self, *args)

    monkeypatch.setattr(GradientReducer, "finish", fails_at_first)
    for weights in ec.run(main, 2):
        torch.testing.assert_close(weights, of_one_process(2))
