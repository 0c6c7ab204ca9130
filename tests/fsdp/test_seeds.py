"""The numbers that a right implementation shows, each from a real backward on different data."""

import copy

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError
from tests.reference import assert_states_close, rows
from tests.worlds import KINDS, events_of, run_world


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


def halves(world: World) -> None:
    rank = world.rank
    # At rest each rank has its half, as a parameter that needs a gradient.
    model = shard(Weights([10.0, 20.0, 30.0, 40.0]), world)
    assert ec.local_shard(model.w).tolist() == [[10.0, 20.0], [30.0, 40.0]][rank]
    assert model.w.requires_grad
    # A real backward: x is the gradient of w.
    model(torch.tensor([10.0, 20.0, 30.0, 40.0])).sum().backward()
    assert ec.local_shard(model.w.grad).tolist() == [[10.0, 20.0], [30.0, 40.0]][rank]
    model.zero_grad()
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]][rank])
    model(x).sum().backward()
    assert ec.local_shard(model.w.grad).tolist() == [[2.0, 3.0], [4.0, 5.0]][rank]
    # Forward is right and leaves parts behind.
    model = shard(Weights([1.0, 2.0, 3.0, 4.0], total=True), world)
    assert model(torch.tensor([2.0])).tolist() == [20.0]
    assert ec.local_shard(model.w).numel() == 2
    assert model.w.numel() == 4
    # Five elements on two ranks.
    model = shard(Weights([1.0, 2.0, 3.0, 4.0, 5.0]), world)
    assert ec.local_shard(model.w).tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0]][rank]
    # Means of rows: rank r holds row r.
    linear = nn.Linear(2, 2, bias=False)
    model = shard(linear, world, layout="rows")
    model(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]][rank])).sum().backward()
    assert ec.local_shard(model.weight.grad).tolist() == [[0.5, 0.5]]
    # Used on one rank only: half of its gradient; used nowhere: none.
    # Where memory is not shared, all ranks take part in a gather, so the unit is the whole model.
    rule = ec.units.by_type(Weights) if world.group.shares_memory else ec.units.whole()
    model = shard(Sometimes(), world, units=rule, layout="rows")
    model(torch.ones(1), used=rank == 0).sum().backward()
    assert ec.local_shard(model.sometimes.w.grad).tolist() == [[1.0, 1.0], [1.0, 1.0]][rank]
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


def unequal_rows(world: World) -> None:
    for layout, num_rows in (("rows", [1, 1, 0, 0]), ("rows", [2, 1, 1, 1])):
        torch.manual_seed(0)
        plain = nn.Linear(3, sum(num_rows))
        torch.manual_seed(0)
        model = shard(nn.Linear(3, sum(num_rows)), world, layout=layout)
        assert tuple(ec.local_shard(model.weight).shape) == (num_rows[world.rank], 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        reference = torch.optim.Adam(plain.parameters(), lr=0.1)
        for step in range(3):
            x = rows(0, 4, 2, 3, step=step, dtype=torch.float32)
            loss = model(x[world.rank]).square().mean()
            loss.backward()
            if not num_rows[world.rank]:
                assert tuple(ec.local_shard(model.weight.grad).shape) == (0, 3)
            optimizer.step()
            optimizer.zero_grad()
            plain(x.flatten(0, 1)).square().mean().backward()
            reference.step()
            reference.zero_grad()
        assert_states_close(model.state_dict(), plain.state_dict())


def few_elements(world: World) -> None:
    """Fewer elements than ranks in a step, a checkpoint and another step."""
    plain = Weights([1.0, 2.0])
    model = shard(Weights([1.0, 2.0]), world)
    assert [info.size for info in model.shard_info("w")] == [1, 1, 0]
    for module in (model, plain):
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.5)
        for step in range(2):
            ranks = [world.rank] if module is model else range(world.size)
            for rank in ranks:
                loss = module(torch.tensor([1.0 + rank, 3.0 * step])).square().sum()
                (loss / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            module.load_state_dict(module.state_dict())
    torch.testing.assert_close(model.state_dict()["w"], plain.w.detach())


def counts(world: World) -> None:
    linear = nn.Linear(128, 64)
    assert ec.FSDP(nn.Linear(2, 2), world.group).local_sharding_ratio() == 1.0
    model = ec.FSDP(linear, world.group, ignored=[linear.bias])
    assert model.num_parameters() == 8256
    assert model.local_sharding_ratio() == (8192 // world.size + 64) / 8256  # 0.5039 on two
    assert sum(ec.local_shard(p).numel() for p in model.parameters()) == 8192 // world.size + 64
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


def updates(world: World) -> None:
    model = shard(Weights([1.0, 2.0, 3.0, 4.0]), world)
    param, place = model.w, ec.local_shard(model.w).data_ptr()
    model.update_shards(torch.tensor([10.0, 20.0, 30.0, 40.0][: 4 // world.size]))
    assert model.w is param
    assert ec.local_shard(model.w).data_ptr() == place
    assert ec.local_shard(model.w).tolist() == [10.0, 20.0, 30.0, 40.0][: 4 // world.size]
    with pytest.raises(ArgumentError, match=f"expected {4 // world.size} elements but got 3"):
        model.update_shards(torch.ones(3))
    with pytest.raises(StateError, match="were forward and backward called"):
        model.sync_gradients()


def gradient_of_the_input(world: World) -> None:
    for values, gradient, expected in (
        ([[1.0, 2.0], [3.0, 4.0]], [1.0, 0.0], [1.0, 2.0]),
        ([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1.0, 0.0, 2.0], [11.0, 14.0]),
    ):
        linear = nn.Linear(2, len(values), bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(values))
        x = torch.ones(2, requires_grad=True)
        for layout in ("flat", "rows"):
            model = shard(copy.deepcopy(linear), world, layout=layout)
            x.grad = None
            model(x).backward(torch.tensor(gradient))
            assert x.grad.tolist() == expected


def modes(world: World) -> None:
    """Training or not is the inner module's, too; without gradients nothing is reduced."""
    model = shard(nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.BatchNorm1d(50)), world)
    statistics = model.module[2].running_mean
    x = torch.ones(2, 3)
    model.eval()
    with torch.no_grad():
        output = model(x)
    assert torch.equal(output[0], output[1])  # nothing was dropped
    assert output.grad_fn is None
    assert not model.module[1].training
    assert statistics.eq(0).all()
    model.train()
    model(x + world.rank)
    assert model.module[2].running_mean is statistics  # a buffer, not a parameter
    assert statistics.ne(0).any()
    assert not any("running" in name for name, _ in model.named_parameters())
    assert model.memory_stats().num_reduce_scatters == 0


def saved_tensors(world: World) -> None:
    """What autograd saves of a released unit holds no memory of this rank's own."""
    layers = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    model = shard(layers, world, units=ec.units.by_type(nn.Linear))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.ones(1, 40, requires_grad=True))
    weights = [tensor for tensor in saved if tensor.numel() == 40 * 40]
    assert len(weights) == 2
    assert model.memory_stats().gathered == 0
    if not world.group.shares_memory:
        assert [weight.untyped_storage().nbytes() for weight in weights] == [0, 0]
    output.sum().backward()


def orders(world: World) -> list[tuple[str, ...]]:
    """The collectives of two steps."""
    model = ec.FSDP(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]),
        world.group,
        units=ec.units.by_type(nn.Linear),
        min_num_params=0,
    )
    with events_of(world.rank, "collective.issue") as events:
        for step in range(2):
            model(torch.full((1, 8), float(step + world.rank))).sum().backward()
    assert [name for name, _ in model.named_parameters()] == [
        f"{i}.{name}" for i in range(4) for name in ("weight", "bias")
    ]
    return [(event.facts["op"], event.facts["label"]) for event in events]


CHECKS = {
    1: (counts, updates),
    2: (halves, counts, updates, gradient_of_the_input, modes, saved_tensors),
    3: (gradient_of_the_input, few_elements),
    4: (unequal_rows, statistics),
}


def every_check(world: World) -> list[tuple[str, ...]]:
    for check in CHECKS[world.size]:
        check(world)
    return orders(world)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted(CHECKS))
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_an_equal_order_of_collectives(kind: str, ranks: int) -> None:
    first, *others = run_world(kind, every_check, ranks)
    assert first
    assert others == [first] * (ranks - 1)
