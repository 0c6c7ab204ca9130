"""What a user writes into ``.grad`` between two backwards counts, as in one process."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import StateError
from tests.fsdp import kinds

WIDE = {"precision": ec.MixedPrecision(reduce=torch.float64)}
NAMES = ("flat", "rows", "flat parameters", "zero 1", "replicated", "small units", "offloaded")
KINDS = {name: kinds.KINDS[name] for name in NAMES}
OPTIONS = KINDS | {f"{name}, summed wider": one | WIDE for name, one in KINDS.items()}


def replace_half(param: nn.Parameter) -> None:
    param.grad = param.grad * 0.5


def replace_by_zeros(param: nn.Parameter) -> None:
    param.grad = torch.zeros_like(param)


def exchange_memory(param: nn.Parameter) -> None:
    param.grad.data = param.grad.data * 0.5


def scale(param: nn.Parameter) -> None:
    param.grad.mul_(0.5)


def scale_data(param: nn.Parameter) -> None:
    param.grad.data.mul_(0.5)


def scale_shard(param: nn.Parameter) -> None:
    ec.local_shard(param.grad).mul_(0.5)


def drop(param: nn.Parameter) -> None:
    param.grad = None


WRITES = (
    replace_half,
    replace_by_zeros,
    exchange_memory,
    scale,
    scale_data,
    scale_shard,
    drop,
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def train(
    wrapped: Any, rank: int, size: int, write: Callable[[nn.Parameter], None]
) -> list[Tensor]:
    """Weights after a step of three backwards, after the first of which ``write`` is called."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x = torch.arange(16.0).view(4, 4).sin()[rank::size]
    for k in range(4):
        is_kept = k == 1 and isinstance(wrapped, ec.FSDP)
        with wrapped.no_sync() if is_kept else nullcontext():
            wrapped(x + k).square().mean().backward()
        if k == 0:
            for param in wrapped.parameters():
                write(param)
        if k == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # of what came after zeros in the same memory
    return [value.clone() for value in wrapped.state_dict().values()]


def writes(world: ec.World, name: str) -> None:
    for write in WRITES:
        wrapped = ec.FSDP(model(), world.group, **OPTIONS[name])
        actual, expected = (
            train(wrapped, world.rank, world.size, write),
            train(model(), 0, 1, write),
        )
        name_of = write.__name__
        torch.testing.assert_close(actual, expected, msg=lambda text, by=name_of: f"{by}: {text}")


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_written_into_kept_gradients_is_in_the_next_sum(name: str) -> None:
    ec.run(writes, 2, args=(name,))


@pytest.mark.parametrize("name", ["replicated", "rows, summed wider"])
def test_what_is_written_into_kept_gradients_is_in_the_next_sum_of_processes(name: str) -> None:
    ec.run(writes, 2, "processes", args=(name,))


def exchanges(world: ec.World) -> Iterator[None]:
    wrapped = ec.FSDP(model(), world.group, strategy=ec.Strategy.NO_SHARD)
    first, second = wrapped.module[0].weight, wrapped.module[2].weight
    wrapped(torch.ones(2, 4)).sum().backward()
    held = second.grad.detach()
    first.grad.data = torch.zeros(4, 4)
    before, own = held.clone(), first.grad
    wrapped.zero_grad()
    wrapped(torch.full((2, 4), 1.0 + world.rank)).sum().backward()
    assert torch.equal(held, before)
    assert not own.any()
    grads = [first.grad.clone() for _ in range(world.size)]
    world.group.all_gather(grads, first.grad)
    assert torch.equal(*grads)


def test_a_gradient_of_other_memory_is_reduced_also_if_somebody_keeps_another() -> None:
    ec.run(exchanges, 2)


def keeps_small_parts(world: ec.World) -> None:
    """Only the element that is written loses what ``.grad`` cannot hold."""
    wrapped = ec.FSDP(nn.Linear(4, 1, bias=False), world.group, min_num_params=0, **WIDE)
    small = 2.0**-30
    wrapped(torch.ones(1, 4)).sum().backward()
    wrapped(torch.full((1, 4), small)).sum().backward()
    shard = ec.local_shard(wrapped.module.weight.grad)
    assert torch.equal(shard, torch.ones(2))
    wrapped.module.weight.grad.data.mul_(torch.tensor([[2.0, 1.0, 2.0, 1.0]]))
    wrapped(torch.full((1, 4), -1.0)).sum().backward()
    shard = ec.local_shard(wrapped.module.weight.grad)
    assert torch.equal(shard, torch.tensor([1.0, small]))


def test_a_write_through_data_replaces_the_elements_that_it_changes() -> None:
    ec.run(keeps_small_parts, 2)


class FewElements(nn.Module):
    """Parameters without dims, of one element and of more, which ranks hold or do not hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.zero_dims = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.ones(1))
        self.two_dims = nn.Parameter(torch.ones(1, 1))
        self.more = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.more(x * self.zero_dims * self.one) * self.two_dims
        return output


def sets_whole_gradients(world: ec.World, options: dict[str, Any]) -> None:
    model = ec.FSDP(FewElements(), world.group, min_num_params=0, **options)
    values = [torch.randn(param.shape) for param in model.parameters()]
    for param, value in zip(model.parameters(), values, strict=True):
        param.grad = value
    alone = FewElements()
    for param, value in zip(alone.parameters(), values, strict=True):
        param.grad = value.clone()
    for one, x in ((model, torch.ones(1, 3) * world.rank), (alone, torch.arange(2.0)[:, None])):
        one(x.expand(-1, 3)).sum(1).mean().backward()
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad.norm(), expected.grad.norm())
        assert param.grad.shape == expected.shape


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_a_whole_gradient_may_be_set_for_parameters_of_any_size(layout: str) -> None:
    ec.run(sets_whole_gradients, 2, args=({"layout": layout},))


def hooks_a_flat_parameter(world: ec.World) -> None:
    model = ec.FSDP(nn.Linear(3, 2), world.group, min_num_params=0, use_orig_params=False)
    handle = next(model.parameters()).register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(StateError, match="register_hook on a flat parameter"):
        model(torch.ones(1, 3)).sum().backward()
    handle.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert next(model.parameters()).grad is not None


def test_a_hook_that_no_gradient_reaches_is_refused() -> None:
    ec.run(hooks_a_flat_parameter, 2)
