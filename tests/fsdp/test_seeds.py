"""The numbers that a right implementation shows, each from a real backward on different data."""

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import ArgumentError, StateError
from echelon.world.base import World
from tests.worlds import KINDS, run_world


class Weights(nn.Module):
    """``y = x * w``, or ``y = x * sum(w)``."""

    def __init__(self, values: list[float], *, total: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))
        self.total = total

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.w.sum() if self.total else self.w)


def shard(model: nn.Module, world: World, **options: object) -> ec.FSDP:
    return ec.FSDP(model, world.group, min_num_params=0, **options)


def checks_of_two_ranks(world: World) -> None:
    rank = world.rank
    # At rest each rank has its half, as a parameter that needs a gradient.
    model = shard(Weights([10.0, 20.0, 30.0, 40.0]), world)
    assert model.w.tolist() == [[10.0, 20.0], [30.0, 40.0]][rank]
    assert model.w.requires_grad
    # A real backward: x is the gradient of w.
    model(torch.tensor([10.0, 20.0, 30.0, 40.0])).sum().backward()
    assert model.w.grad.tolist() == [[10.0, 20.0], [30.0, 40.0]][rank]
    model.zero_grad()
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]][rank])
    model(x).sum().backward()
    assert model.w.grad.tolist() == [[2.0, 3.0], [4.0, 5.0]][rank]
    # Forward is right and leaves parts behind.
    model = shard(Weights([1.0, 2.0, 3.0, 4.0], total=True), world)
    assert model(torch.tensor([2.0])).tolist() == [20.0]
    assert model.w.numel() == 2
    # Five elements on two ranks.
    model = shard(Weights([1.0, 2.0, 3.0, 4.0, 5.0]), world)
    assert model.w.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0]][rank]
    # Means of rows: rank r holds row r.
    linear = nn.Linear(2, 2, bias=False)
    model = shard(linear, world, layout="rows")
    model(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]][rank])).sum().backward()
    assert model.weight.grad.tolist() == [[0.5, 0.5]]
    # Used on one rank only: half of its gradient; used nowhere: none.
    # Where memory is not shared, all ranks take part in a gather, so the unit is the whole model.
    rule = ec.units.by_type(Weights) if world.group.shares_memory else ec.units.whole()
    model = shard(Sometimes(), world, units=rule, layout="rows")
    model(torch.ones(1), used=rank == 0).sum().backward()
    assert model.sometimes.w.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]][rank]
    assert model.never.w.grad is None
    assert model.frozen.grad is None


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = Weights([1.0] * 4), Weights([1.0] * 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.always = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, used: bool) -> Tensor:
        y = x * self.always * self.frozen
        return y + self.sometimes(2 * x) if used else y


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_two_ranks(kind) -> None:
    run_world(kind, checks_of_two_ranks, 2)


def checks_of_four_ranks(world: World) -> None:
    for layout, rows in (("rows", [1, 1, 0, 0]), ("rows", [2, 1, 1, 1])):
        torch.manual_seed(0)
        plain = nn.Linear(3, sum(rows))
        torch.manual_seed(0)
        model = shard(nn.Linear(3, sum(rows)), world, layout=layout)
        assert tuple(model.weight.shape) == (rows[world.rank], 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        reference = torch.optim.Adam(plain.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 2, 3, generator=generator)
            loss = model(x[world.rank]).square().mean()
            loss.backward()
            if not rows[world.rank]:
                assert tuple(model.weight.grad.shape) == (0, 3)
            optimizer.step()
            optimizer.zero_grad()
            plain(x.flatten(0, 1)).square().mean().backward()
            reference.step()
            reference.zero_grad()
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_without_rows_train_too(kind) -> None:
    run_world(kind, checks_of_four_ranks, 4)


def counts(world: World) -> None:
    model = ec.FSDP(nn.Linear(128, 64), world.group)
    assert model.num_parameters() == 8256
    if world.size == 1:
        assert model.local_sharding_ratio() == 1.0
        assert ec.FSDP(nn.Linear(100, 50), world.group).local_sharding_ratio() == 1.0
        return
    # Half of the weight and the whole bias.
    linear = nn.Linear(128, 64)
    partly = ec.FSDP(linear, world.group, ignored=[linear.bias])
    assert partly.local_sharding_ratio() == 4160 / 8256
    assert round(partly.local_sharding_ratio(), 4) == 0.5039
    # 1001 elements are sharded, 999 are not.
    small = ec.FSDP(nn.Linear(998, 1), world.group)
    assert small.local_sharding_ratio() == 1.0
    assert [info.size for info in small.shard_info("weight")] == [998, 998]
    large = ec.FSDP(nn.Linear(999, 1), world.group)
    assert large.local_sharding_ratio() == 0.5
    assert next(info.size for info in large.shard_info("weight")) == 500
    with pytest.raises(ArgumentError, match="Parameter 'nothing' is in no unit"):
        large.shard_info("nothing")


@pytest.mark.parametrize("ranks", [1, 2])
def test_counts_of_parameters(ranks) -> None:
    ec.run(counts, ranks)


def statistics(world: World) -> None:
    model = ec.FSDP(
        nn.Sequential(*[nn.Linear(32, 32) for _ in range(16)]),
        world.group,
        units=ec.units.by_type(nn.Linear),
    )
    before = model.memory_stats()
    assert before.shards == 16 * 1056 * 4 // world.size
    assert (before.num_all_gathers, before.num_reduce_scatters, before.gradients) == (0, 0, 0)
    model(torch.randn(2, 32)).sum().backward()
    after = model.memory_stats()
    # The root has no parameters of its own, and is gathered once for forward.
    assert after.num_all_gathers == 2 * 16 + 1  # 2 U - 1, U = 17
    assert after.num_reduce_scatters == 16
    assert after.gradients == after.shards
    assert after.saved == 2 * (16 * 1056 * 4 - after.shards)
    assert not any(unit.gathered for unit in model.units)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_count_what_happened(kind) -> None:
    run_world(kind, statistics, 4)


def updates(world: World) -> None:
    model = shard(Weights([1.0, 2.0, 3.0, 4.0]), world)
    param, place = model.w, model.w.data_ptr()
    model.update_shards(torch.tensor([10.0, 20.0, 30.0, 40.0][: 4 // world.size]))
    assert model.w is param
    assert model.w.data_ptr() == place
    assert model.w.tolist() == [10.0, 20.0, 30.0, 40.0][: 4 // world.size]
    with pytest.raises(ArgumentError, match=f"expected {4 // world.size} elements but got 3"):
        model.update_shards(torch.ones(3))
    with pytest.raises(StateError, match="were forward and backward called"):
        model.sync_gradients()


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_are_updated_in_place(ranks) -> None:
    ec.run(updates, ranks)
