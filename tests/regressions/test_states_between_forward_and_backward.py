"""What is written between a forward and its backward is seen by states and by that backward.

A forward leaves units whole for its backward: the root, and with some strategies all of them. A
step, or a load, makes these values old.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests import reference
from tests.reference import assert_states_close, train_alone
from tests.worlds import KINDS, run_world

WIDTH, BLOCKS, LR = 4, 4, 0.5
CLOSE = {"rtol": 1e-11, "atol": 1e-12}

State = dict[str, Tensor]


class Net(nn.Module):
    """Uses the blocks that it is told to, between parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, used: Sequence[int] = tuple(range(BLOCKS))) -> Tensor:
        x = self.first(x)
        for i in used:
            x = x + self.blocks[i](x).tanh()
        return self.last(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def rows(rank: int, step: int = 0) -> Tensor:
    return reference.rows(rank, 3, WIDTH, step=step)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"strategy": ec.Strategy.SHARD_GRAD_OP},
    {"strategy": ec.Strategy.SHARD_OPTIMIZER, "layout": "rows"},
    {"strategy": ec.Strategy.NO_SHARD},
    {"forward_prefetch": 2, "use_orig_params": False},
    {"precision": ec.MixedPrecision(master=torch.float64, compute=torch.float32)},
]


def shard(world: ec.World, **options: Any) -> ec.FSDP:
    options = {"units": ec.units.by_type(nn.Linear), "min_num_params": 0, **options}
    return ec.FSDP(build(), world.group, **options)


def stepped(size: int) -> State:
    """Of one process, after a step with the rows of all ranks."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for rank in range(size):
        (model(rows(rank)).square().mean() / size).backward()
    optimizer.step()
    return model.state_dict()


# States ---------------------------------------------------------------------------------------


def by_full_parameters(model: ec.FSDP) -> State:
    with model.full_parameters():
        state = model.module.state_dict()
        return {name: value.to(torch.float64, copy=True) for name, value in state.items()}


def by_writeback(model: ec.FSDP) -> State:
    with model.full_parameters(writeback=True):
        pass  # what was whole is written to the parts
    return model.state_dict()


def by_copy(model: ec.FSDP) -> State:
    return torch.optim.swa_utils.AveragedModel(model).module.state_dict()


def by_unwrap(model: ec.FSDP) -> State:
    return {name: value.detach().clone() for name, value in model.unwrap().state_dict().items()}


def by_evaluation(model: ec.FSDP) -> State:
    with torch.no_grad():
        model(rows(0))
    return model.state_dict()


WAYS: list[Callable[[ec.FSDP], State]] = [
    ec.FSDP.state_dict,
    ec.FSDP.whole_state_dict,
    by_full_parameters,
    by_writeback,
    by_copy,
    by_evaluation,
    by_unwrap,
]


def read_all_states(world: ec.World) -> None:
    expected = stepped(world.size)
    for options in OPTIONS:
        close = {"rtol": 1e-4, "atol": 1e-5} if "precision" in options else CLOSE
        for way in WAYS:
            model = shard(world, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            model(rows(world.rank)).square().mean().backward()
            output = model(rows(world.rank))
            optimizer.step()
            assert_states_close(way(model), expected, **close)
            del output


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_states_have_what_a_step_between_forward_and_backward_wrote(kind: str) -> None:
    run_world(kind, read_all_states, 2)


def load_and_read(world: ec.World) -> None:
    for options in OPTIONS[:4]:
        for parts in (False, True):
            model, other = shard(world, **options), shard(world, **options)
            with other.full_parameters(writeback=True), torch.no_grad():
                for param in other.parameters():
                    param.copy_(torch.full_like(param, 3.0))
            output = model(rows(world.rank))
            if parts:
                model.load_sharded_state_dict(other.sharded_state_dict())
            else:
                model.load_state_dict(other.state_dict())
            with model.full_parameters():
                assert all(bool((param == 3.0).all()) for param in model.parameters()), options
            assert_states_close(model.state_dict(), other.state_dict(), **CLOSE)
            shards = other.sharded_state_dict()
            assert_states_close(model.sharded_state_dict(), shards, **CLOSE)
            del output


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_states_have_what_a_load_between_forward_and_backward_wrote(kind: str) -> None:
    run_world(kind, load_and_read, 2)


# The backward that comes after ----------------------------------------------------------------


def used_by(rank: int, step: int) -> list[int]:
    """Blocks that a rank uses in a step; each rank skips some, not always the same."""
    skipped = (rank + step) % BLOCKS
    return [i for i in range(BLOCKS) if i != skipped and (i, rank) != (3, 0)]


def gradients_of(model: nn.Module) -> State:
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
        for name, param in model.named_parameters()
    }


def look(model: ec.FSDP, step: int) -> None:
    """What someone may do between a forward and its backward."""
    if step % 3 == 0:
        model.state_dict()
    elif step % 3 == 1:
        with model.full_parameters("blocks.1"):
            pass
    else:
        torch.optim.swa_utils.AveragedModel(model)


def train_with_looks(world: ec.World, num_forwards: int, **options: Any) -> State:
    model = shard(world, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(step: int) -> Iterator[Tensor]:
        outputs = [
            model(rows(world.rank, step + i), used_by(world.rank, step + i))
            for i in range(num_forwards)
        ]
        if step != 3:
            look(model, step)
        yield sum(output.square().mean() for output in outputs)

    reference.train(optimizer, 6, losses)
    return model.state_dict()


def train_plain(size: int, num_forwards: int) -> State:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(step: int) -> Iterator[Tensor]:
        for rank in range(size):
            for i in range(num_forwards):
                output = model(rows(rank, step + i), used_by(rank, step + i))
                yield output.square().mean() / size

    return train_alone(model, optimizer, 6, losses)


def train_all_with_looks(world: ec.World) -> None:
    for num_forwards in (1, 2):
        expected = train_plain(world.size, num_forwards)
        for options in OPTIONS[:4]:
            found = train_with_looks(world, num_forwards, **options)
            assert_states_close(found, expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_after_a_look_gathers_again_where_ranks_skip_units(kind: str) -> None:
    run_world(kind, train_all_with_looks, 2, timeout=20)


def new_values() -> Net:
    model = build()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(-2)
    return model


def derivative_of_input(before: Net, after: Net, x: Tensor) -> Tensor:
    """What a backward gives that meets the activations of ``before`` and weights of ``after``."""
    with torch.no_grad():
        hidden = [before.first(x)]
        for block in before.blocks:
            hidden.append(hidden[-1] + block(hidden[-1]).tanh())
        gradient = torch.ones(len(x), WIDTH, dtype=torch.float64) @ after.last.weight
        for i in reversed(range(BLOCKS)):
            slope = 1 - before.blocks[i](hidden[i]).tanh().square()
            gradient = gradient + (gradient * slope) @ after.blocks[i].weight
        return gradient @ after.first.weight


def load_before_backward(world: ec.World) -> None:
    after = new_values()
    expected = derivative_of_input(build(), after, rows(world.rank))
    for i, options in enumerate(OPTIONS):
        dtype = torch.float32 if "precision" in options else torch.float64
        for look_too in (False, True):
            model = shard(world, **options)
            x = rows(world.rank).to(dtype).requires_grad_()
            output = model(x)
            model.load_state_dict(after.state_dict())
            if look_too:
                model.state_dict()
            output.sum().backward()
            assert x.grad is not None
            close = {"rtol": 1e-4, "atol": 1e-3} if dtype is torch.float32 else CLOSE
            torch.testing.assert_close(x.grad.double(), expected, **close, msg=f"{i}, {look_too}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_after_a_load_takes_what_was_loaded_with_every_strategy(kind: str) -> None:
    run_world(kind, load_before_backward, 2)


def step_before_backward(world: ec.World) -> None:
    for options in OPTIONS[:4]:
        for look_too in (False, True):
            model = shard(world, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            model(rows(world.rank)).square().mean().backward()
            output = model(rows(world.rank))
            optimizer.step()
            if look_too:
                model.state_dict()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                output.sum().backward()
            model(rows(world.rank)).square().mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_after_a_step_is_the_error_of_torch_with_every_strategy(kind: str) -> None:
    run_world(kind, step_before_backward, 2)


# Several forwards, of which a backward goes through some ---------------------------------------


def losses_of(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    """Two losses; the second uses few blocks, and others on each rank."""
    first = model(rows(rank, step), [0, 1, 2, 3] if rank == step % 2 else [3])
    second = model(rows(rank, step + 1), [2] if rank == step % 2 else [0])
    return [first.square().mean(), second.square().mean()]


def partial_steps(model: nn.Module, rank: int, size: int) -> None:
    """Backwards through some of the losses; the last one has a forward of an earlier step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(4):
        old, new = losses_of(model, rank, step)
        (new / size).backward()
        more = model(rows(rank, step + 2), [rank]).square().mean()
        ((old + more) / size).backward()
        optimizer.step()
        old, new = losses_of(model, rank, step)
        (new / size).backward()
        (old / size).backward()
        more = model(rows(rank, step + 2), [1 + rank]).square().mean()
        (more / size).backward()


def partial_backwards(world: ec.World) -> None:
    plain = build()
    for rank in range(world.size):
        partial_steps(plain, rank, world.size)
    for options in OPTIONS[:4]:
        model = shard(world, reduction="sum", **options)
        partial_steps(model, world.rank, world.size)
        assert_states_close(gradients_of(model.unwrap()), gradients_of(plain), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_through_some_of_several_forwards_leaves_the_others(kind: str) -> None:
    run_world(kind, partial_backwards, 2, timeout=20)
