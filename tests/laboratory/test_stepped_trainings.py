"""Stepping through trainings: what each wrapper moves, of ours and of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import echelon as ec

RANKS = 2


def model() -> nn.Sequential:
    """Two layers with 4 x 4 weights and no bias."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def rows(rank: int) -> torch.Tensor:
    """What a rank trains on."""
    return torch.arange(8.0).view(2, 4) + rank


def gradients(rank: int) -> list[torch.Tensor]:
    """The gradients of the model on the rows of a rank alone."""
    alone = model()
    alone(rows(rank)).sum().backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


def mean_gradients() -> torch.Tensor:
    """The mean over ranks, of all parameters in order. 1D"""
    ranks = [torch.cat([g.flatten() for g in gradients(rank)]) for rank in range(RANKS)]
    return torch.stack(ranks).mean(dim=0)


def with_ddp(world: ec.World) -> None:
    """Our DDP."""
    ddp = ec.DDP(model(), world.group)
    ddp(rows(world.rank)).sum().backward()


def with_fsdp(world: ec.World) -> None:
    """Our FSDP, each layer in a unit."""
    fsdp = ec.FSDP(model(), world.group, units=ec.units.by_type(nn.Linear))
    fsdp(rows(world.rank)).sum().backward()


def with_torch_ddp(world: ec.World) -> None:
    """PyTorch's DDP, on the group that its own function makes."""
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model())
    ddp(rows(dist.get_rank())).sum().backward()
    dist.destroy_process_group()


def with_torch_fsdp(world: ec.World) -> None:
    """PyTorch's FSDP2."""
    dist.init_process_group("gloo")
    sharded = model()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    sharded(rows(dist.get_rank())).sum().backward()
    dist.destroy_process_group()


def calls_of(fn: Callable[..., Any], op: str, **facts: object) -> list[ec.SteppedCall]:
    """The calls with that name and those facts."""
    return [
        call
        for call in ec.step_through(fn, RANKS)
        if call.op == op and all(getattr(call, name) == value for name, value in facts.items())
    ]


def assert_same_numbers(values: torch.Tensor, expected: torch.Tensor) -> None:
    """They are the same in some order: buckets and units have parameters in orders of their own."""
    torch.testing.assert_close(values.flatten().sort().values, expected.flatten().sort().values)


def test_ddp_averages_the_gradients_of_its_buckets_in_backward() -> None:
    calls = calls_of(with_ddp, "all_reduce", reduce="mean")
    (bucket,) = [call for call in calls if "bucket 0" in str(call.label)]
    for rank in range(RANKS):
        local = torch.cat([g.flatten() for g in gradients(rank)])
        # Behind the gradients, the bucket has what says which parameters were used.
        assert_same_numbers(bucket.before[rank].values[:32], local)
        assert_same_numbers(bucket.after[rank].values[:32], mean_gradients())
        assert bucket.places[rank].function == "with_ddp"  # the line of backward


def test_fsdp_averages_the_gradients_of_each_unit() -> None:
    calls = [
        call for call in ec.step_through(with_fsdp, RANKS) if "gradients of unit" in str(call.label)
    ]
    expected = mean_gradients().split(16)
    assert [call.label for call in calls] == ["gradients of unit 1", "gradients of unit 0"]
    for call, mean in zip(calls, reversed(expected), strict=True):
        assert_same_numbers(call.after[0].values, mean)


def test_a_pipeline_sends_outputs_forward_and_gradients_back() -> None:
    def main(world: ec.World) -> None:
        pipeline = ec.Pipeline(
            list(model()), world.group, microbatches=2, loss_fn=nn.functional.mse_loss
        )
        pipeline.step(rows(0), target=torch.zeros(2, 4))

    with ec.step_through(main, RANKS) as steps:
        messages = [call for call in steps if call.is_message]
    assert {call.ranks for call in messages} == {(0, 1), (1, 0)}
    backward = [call for call in messages if call.ranks == (1, 0)]
    assert len(backward) == 2  # one for each microbatch
    assert [str(call.label).rpartition(",")[0] for call in backward] == [
        f"gradients for stage 0, microbatch {microbatch}" for microbatch in range(2)
    ]
    outputs = [call for call in messages if str(call.label).startswith("outputs of stage 0")]
    expected = model()[0](rows(0)).detach()
    for call, row in zip(outputs, expected, strict=True):
        assert torch.equal(call.before[0].values, call.after[1].values)
        torch.testing.assert_close(call.after[1].values, row)  # sums of other shapes
        assert call.changed == {0: []}


def test_torchs_ddp_is_seen_with_its_own_calls() -> None:
    calls = calls_of(with_torch_ddp, "all_reduce")
    assert len(calls) == 1
    assert_same_numbers(calls[0].after[1].values, mean_gradients())
    assert calls[0].places[0].function == "with_torch_ddp"


def test_torchs_fsdp_gathers_layers_and_scatters_their_gradients() -> None:
    gathers = calls_of(with_torch_fsdp, "all_gather_single")
    scatters = calls_of(with_torch_fsdp, "reduce_scatter_single")
    whole = torch.cat([p.detach().flatten() for p in model().parameters()]).split(16)
    assert [call.after[0].numel for call in gathers] == [16] * len(gathers)
    assert torch.equal(gathers[0].after[1].values, whole[0])
    assert gathers[0].received(0) == gathers[0].sent(0) == 32
    for call, mean in zip(scatters, reversed(mean_gradients().split(16)), strict=True):
        got = torch.cat([call.after[rank].values for rank in range(RANKS)])
        torch.testing.assert_close(got, mean)


def test_calls_of_torch_distributed_are_seen_one_by_one() -> None:
    def main(world: ec.World) -> float:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        total = torch.tensor([float(rank)])
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait()
        pair = dist.new_group([0, 2])
        if rank in (0, 2):
            dist.broadcast(total, 2, group=pair)
        if rank == 1:
            dist.send(total, 2)
        if rank == 2:
            dist.recv(total, 1)
        inputs = list(torch.arange(float(size)).split(1))
        dist.all_to_all([torch.empty(1) for _ in range(size)], inputs)
        dist.barrier()
        dist.destroy_process_group()
        return total.item()

    steps = ec.step_through(main, 3)
    seen = [(call.op, tuple(call.ranks), call.nbytes) for call in steps]
    assert seen == [
        ("all_reduce", (0, 1, 2), 24),
        ("broadcast", (0, 2), 4),
        ("send", (1, 2), 4),
        (seen[3][0], (0, 1, 2), 24),
        ("barrier", (0, 1, 2), 0),
    ]
    assert "all_to_all" in seen[3][0]
    assert steps.results == [3.0, 3.0, 3.0]


def test_an_asynchronous_call_is_a_step_when_the_last_rank_has_issued_it() -> None:
    def main(world: ec.World) -> float:
        first, second = torch.ones(1), torch.ones(1)
        works = [world.group.all_reduce(each, async_op=True) for each in (first, second)]
        past.append(world.rank)
        for work in works:
            assert work is not None
            work.wait()
        return (first + second).item()

    past: list[int] = []
    steps = ec.step_through(main, 3)
    assert [len(past) for _ in steps] == [2, 2]  # the last rank is in its call
    assert steps.results == [6.0] * 3
