"""Ranks may skip units of one checkpoint, which backward reaches from the end and runs forwards."""

from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from tests import reference
from tests.reference import assert_states_close, train_alone
from tests.worlds import run_world

WIDTH, BLOCKS, RANKS = 4, 3, 2
Used = Sequence[tuple[Sequence[int], Sequence[int]]]  # by step and rank: the blocks that it uses
ALL = [0, 1, 2]
PROGRAMS: dict[str, Used] = {
    "one skips the last": [(ALL, ALL), (ALL, ALL), (ALL, [0, 1]), ([2], ALL)],
    "all skip the first": [([1, 2], [1, 2]), ([0, 2], ALL), (ALL, [1]), ([], [0])],
    "from the first step": [([0, 2], [1]), ([2], ALL), (ALL, ALL), ([1, 2], [0])],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Some of its blocks, together in one checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        def through(x: Tensor) -> Tensor:
            for i in used:
                x = self.blocks[i](x)
            return x

        x = self.first(x)
        if self.reentrant is None:
            return through(x)
        return checkpoint(through, x, use_reentrant=self.reentrant)


def build(reentrant: bool | None = None) -> Net:
    torch.manual_seed(0)
    return Net(reentrant).double()


def rows(step: int, rank: int) -> Tensor:
    return reference.rows(rank, 3, WIDTH, step=step)


def sharded(world: ec.World, net: nn.Module, strategy: ec.Strategy) -> ec.FSDP:
    rule = ec.units.by_type(Block)
    return ec.FSDP(net, world.group, units=rule, min_num_params=0, strategy=strategy)


def train(
    world: ec.World, program: str, strategy: ec.Strategy, reentrant: bool
) -> dict[str, Tensor]:
    model = sharded(world, build(reentrant), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs = PROGRAMS[program]

    def losses(step: int) -> Iterator[Tensor]:
        yield model(rows(step, world.rank), programs[step][world.rank]).square().mean()

    reference.train(optimizer, len(programs), losses)
    assert not any(unit.gathered for unit in model.units)
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("program", list(PROGRAMS))
@pytest.mark.parametrize("strategy", [ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("reentrant", [False, True])
def test_ranks_skip_units_of_one_checkpoint(
    program: str, strategy: ec.Strategy, reentrant: bool
) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    programs = PROGRAMS[program]

    def losses(step: int) -> Iterator[Tensor]:
        for rank in range(RANKS):
            yield model(rows(step, rank), programs[step][rank]).square().mean() / RANKS

    expected = train_alone(model, optimizer, len(programs), losses)
    work = partial(train, program=program, strategy=strategy, reentrant=reentrant)
    for state in run_world("gloo", work, RANKS, timeout=20):
        assert_states_close(state, expected, rtol=1e-11, atol=1e-12)


def evaluate(world: ec.World, strategy: ec.Strategy) -> None:
    model, plain = sharded(world, build(), strategy), build()
    twice = [0, 1, 2, 0]
    for step in range(2):
        model(rows(step, world.rank), twice).square().mean().backward()
    for step in range(3):
        used = [0, 2, 0] if world.rank == step % 2 else twice
        with torch.no_grad():
            found, expected = (one(rows(step, world.rank), used) for one in (model, plain))
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP])
def test_ranks_skip_units_in_an_evaluation_of_a_unit_that_is_called_twice(
    strategy: ec.Strategy,
) -> None:
    run_world("gloo", partial(evaluate, strategy=strategy), RANKS, timeout=20)


class Tied(nn.Module):
    """Blocks with one weight, which belongs to the root, each in a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[0].linear.weight = self.blocks[1].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def train_tied(world: ec.World) -> None:
    strategies = (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP, ec.Strategy.NO_SHARD)
    for strategy in strategies:
        for reentrant in (False, True):
            for needs_gradient in (False, True):
                torch.manual_seed(0)
                plain = Tied(reentrant).double()
                torch.manual_seed(0)
                model = sharded(world, Tied(reentrant).double(), strategy)
                for rank in range(world.size):
                    (plain(rows(0, rank)) / world.size).backward()
                model(rows(0, world.rank).requires_grad_(needs_gradient)).backward()
                module = model.unwrap()
                for (name, param), expected in zip(
                    module.named_parameters(), plain.parameters(), strict=True
                ):
                    assert param.grad is not None, name
                    torch.testing.assert_close(param.grad, expected.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_tied_weight_gets_a_gradient_from_each_reentrant_checkpoint(kind: str) -> None:
    run_world(kind, train_tied, RANKS, timeout=20)
