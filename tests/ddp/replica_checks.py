"""What must hold for the replicas of a DDP in every world, as functions of one rank."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import echelon as ec
from tests.ddp.checks import check, mean_over_ranks
from tests.ddp.models import mlp, rows, share


@check
def replicas_that_part_are_named_on_every_rank(world: ec.World) -> None:
    """A rank that clips alone; the ranks compare in the second reduction, or when they are told."""
    for options, last in (({}, 1), ({"check_replicas": 1}, 1), ({"check_replicas": 0}, None)):
        ddp = ec.DDP(mlp(), world.group, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss = ddp(rows(step, 1)).pow(2).sum()
            if step == last and world.size > 1:
                with pytest.raises(ec.ModelMismatch) as info:
                    loss.backward()
                assert "the values of parameter '0.weight'" in str(info.value)
                assert set(info.value.found) == set(range(world.size))
                break
            loss.backward()
            if world.rank == 0:
                nn.utils.clip_grad_norm_(ddp.module.parameters(), 0.1)
            optimizer.step()


class Writing(nn.Module):
    """Its forward writes into its parameter: the same on all ranks, or what the rank has seen.

    With ``replaces`` it gives the parameter other memory for that.
    """

    def __init__(self, same: bool, replaces: bool = False) -> None:
        super().__init__()
        self.same, self.replaces = same, replaces
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = 2.0 if self.same else x.mean()
            if self.replaces:
                self.weight.data = self.weight.data * factor
            else:
                self.weight.mul_(factor)
        return x @ self.weight


@check
def a_forward_that_writes_is_as_in_one_process_or_refused_before_the_step(world: ec.World) -> None:
    x = torch.full((2, 4), world.rank + 1.0)
    for replaces in (False, True):
        ddp = ec.DDP(Writing(True, replaces), world.group)
        for _ in range(2):
            ddp(x).sum().backward()
        assert torch.equal(ddp.weight.detach(), torch.full((4,), 4.0))
        ddp = ec.DDP(Writing(False, replaces), world.group)
        if world.size > 1:
            with pytest.raises(ec.ModelMismatch, match="the values of parameter 'weight'"):
                ddp(x).sum().backward()
    if world.size > 1:
        with pytest.raises(ec.ArgumentError, match=r"module '0' has max_norm=0.5"):
            ec.DDP(nn.Sequential(nn.Embedding(4, 2, max_norm=0.5)), world.group)


class Constants(nn.Module):
    """A norm whose statistics change, and constants: a mask, and an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.register_buffer("mask", torch.tensor([0.0, 1.0, 1.0, 1.0]))
        self.register_buffer("scale", torch.ones(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)) * self.mask * self.scale


@check
def constant_buffers_are_not_written(world: ec.World) -> None:
    ddp = ec.DDP(Constants(), world.group)
    batches = [rows(i, world.size, 4, torch.float32) for i in range(4)]
    ahead = ddp(batches[0])
    for batch in batches[1:]:  # the forward of the next batch comes before this backward
        output, ahead = ahead, ddp(batch)
        output.square().mean().backward()
    assert (ddp.mask._version, ddp.scale._version) == (0, 0)
    model = Constants()
    if world.rank:
        model.scale = torch.zeros(1).expand(4)
    if world.rank:
        with pytest.raises(ec.StateError, match="buffer 'scale' was expanded"):
            ec.DDP(model, world.group)
    else:
        ec.DDP(model, world.group)


@check
def states_are_those_of_fsdp(world: ec.World) -> None:
    """States of both, by name, load into each other; the bytes are those of whole tensors."""
    states = []
    for wrap in (ec.DDP, ec.FSDP):
        model = wrap(mlp(), world.group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(share(rows(step, world.size), world.rank, world.size)).pow(2).mean().backward()
            optimizer.step()
        states.append((model.whole_state_dict(), model.optimizer_state_dict(optimizer)))
        assert (model.whole_state_dict(rank0_only=True) == {}) == (world.rank > 0)
        model.load_optimizer_state_dict(optimizer, states[0][1])
        if wrap is ec.DDP:
            stats = model.memory_stats(optimizer)
            nbytes = sum(param.nbytes for param in model.parameters())
            assert stats.parameters == nbytes
            assert stats.gradients == 0  # they are views of buckets
            assert nbytes < stats.buckets < 2 * nbytes
            assert stats.optimizer == 2 * nbytes + 4 * len(list(model.parameters()))
            assert stats.current == sum(stats.by_category().values())
    (weights, of_optimizer), (others, of_other) = states
    assert list(weights) == list(others)
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-12, atol=1e-12)
    assert of_optimizer["param_groups"] == of_other["param_groups"]
    assert list(of_optimizer["state"]) == list(of_other["state"])


class Vectors(nn.Module):
    """Vectors of these sizes; the gradient of each element is what forward is given."""

    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for numel in numels)

    def forward(self, factor: float) -> torch.Tensor:
        return torch.stack([vector.sum() for vector in self.vectors]).sum() * factor


@check
def gradients_of_every_size_travel_in_every_dtype(world: ec.World) -> None:
    mib = 2**18  # elements of float32
    for dtype, sync in itertools.product((None, torch.bfloat16), ("overlap", "manual")):
        ddp = ec.DDP(
            Vectors((256, mib - 1, mib, mib + 1, 3 * mib)),
            world.group,
            gradient_dtype=dtype,
            sync=sync,
        )
        for _ in range(2):  # the second backward makes the buckets anew
            ddp.zero_grad()
            ddp(world.rank + 1.0).backward()
            if sync == "manual":
                ddp.sync_gradients()
            mean = mean_over_ranks(world, lambda rank: rank + 1.0)
            for param in ddp.parameters():
                assert bool((param.grad == mean).all()), (param.shape, dtype, sync)
