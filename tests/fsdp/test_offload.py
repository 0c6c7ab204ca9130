"""Masters, gradients and optimizer state on the host: the same bits, and the bytes where they are.

There is no second memory on a CPU. ``two_memories`` makes one by rule: it knows which tensors are
on the host, and an operation or a collective that CUDA would refuse fails.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon import Offload
from echelon.errors import ArgumentError
from echelon.world.base import World
from tests.fsdp.checking import shard
from tests.fsdp.models import batch, build, loss_of, train_plain
from tests.fsdp.two_memories import separate, watched
from tests.worlds import run_world

LOW = ec.MixedPrecision(compute=torch.bfloat16, buffers=torch.bfloat16)
STEPS = 2


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def train(
    world: World, *, accumulate: bool = False, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """State, optimizer state and losses of some steps, clipped."""
    model = shard(world, build(dtype), **options)
    optimizer = torch.optim.AdamW(trainable(model), lr=0.05)
    seen = []
    for step in range(STEPS):
        if accumulate:  # in shards, and under no_sync
            loss_of(model, *batch(10 + step, world.rank)).backward()
            with model.no_sync():
                model.zero_grad() if step else None
                loss_of(model, *batch(20 + step, world.rank)).backward() if step else None
        loss = loss_of(model, *batch(step, world.rank))
        loss.backward()
        seen += [loss.detach(), ec.clip_grad_norm_(model, 0.1)]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen.append(loss_of(model, *batch(0, world.rank)))
    states = model.optimizer_state_dict(optimizer)["state"]
    moments = {f"{name} {key}": v for name, own in states.items() for key, v in own.items()}
    return {**model.state_dict(), **moments}, seen


CASES = [
    {"layout": "flat", "accumulate": True},
    {"layout": "rows", "strategy": ec.Strategy.SHARD_GRAD_OP, "reduction": 3.0},
    *(
        {"layout": layout, "precision": LOW, "dtype": torch.float32, "min_num_params": least}
        for layout, least in (("flat", 0), ("rows", 100))
    ),
]


def train_all(world: World) -> None:
    """With offload the bits are those without, and those of one process are near."""
    expected, _ = train_plain(world.size, STEPS, clip=0.1)
    for options in CASES:
        plain, seen = train(world, **options)
        for offload in (Offload.OPTIMIZER, Offload.ALL):
            with watched():
                found, also = train(world, offload=offload, **options)
            assert found.keys() == plain.keys()
            for name, value in plain.items():
                assert torch.equal(found[name], value), (name, offload, options)
            assert all(map(torch.equal, also, seen)), (offload, options)
    with watched():
        found, _ = train(world, offload=Offload.ALL)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


def train_all_apart(world: World) -> None:
    separate()  # in a process of its own
    train_all(world)


def test_over_gloo_offload_changes_no_bit() -> None:
    run_world("gloo", train_all_apart, 2)


def test_over_threads_offload_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    separate(monkeypatch.setattr)
    ec.run(train_all, 2)


# --- where the bytes are -------------------------------------------------------------------------


def counts(world: World) -> None:
    """After a step nothing of a part is on the device, or one part in the compute dtype."""
    for layout, precision in (("flat", ec.MixedPrecision()), ("rows", LOW)):
        sizes = {}
        for offload in (Offload.OPTIMIZER, Offload.ALL):
            with watched() as memories:
                model = shard(
                    world,
                    build(torch.float32),
                    layout=layout,
                    precision=precision,
                    offload=offload,
                    strategy=ec.Strategy.SHARD_GRAD_OP,
                )
                optimizer = torch.optim.AdamW(trainable(model), lr=0.05)
                for step in range(2):
                    loss_of(model, *batch(step, world.rank)).backward()
                    for param in trainable(model):
                        assert memories.is_host(param)
                        assert memories.is_host(param.grad)
                    optimizer.step()
                    moments = [own["exp_avg"] for own in optimizer.state.values()]
                    assert all(memories.is_host(one) for one in moments if one.numel())
                    del param, moments
                stats = model.memory_stats()
                left = memories.device_nbytes() - stats.slots
                left -= sum(one.nbytes for one in optimizer.state[trainable(model)[0]]["step"])
                sizes[offload] = left
            own = sum(param.numel() for param in model.parameters())
            num_trained = sum(param.numel() for param in trainable(model))
            staged = own * 2 if precision is LOW else 0
            assert stats.offloaded == 4 * own + 4 * num_trained + staged
            assert stats.gradients == 0
            expected = 0 if offload is Offload.ALL else own * (2 if precision is LOW else 4)
            assert stats.shards + stats.gathered == expected
        parts = own * (2 if precision is LOW else 4)
        assert sizes[Offload.OPTIMIZER] - sizes[Offload.ALL] == parts
        print(sizes, parts)


def test_the_device_keeps_one_part_or_nothing_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    separate(monkeypatch.setattr)
    ec.run(counts, 2)


# --- everything else that touches masters --------------------------------------------------------


def handles_masters(world: World) -> None:
    for offload in (Offload.OPTIMIZER, Offload.ALL):
        with watched() as memories:
            with torch.device("meta"):
                on_meta = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
            model = ec.FSDP(
                on_meta,
                world.group,
                units=ec.units.by_type(nn.Linear),
                min_num_params=50,  # the second is replicated
                precision=ec.MixedPrecision(compute=torch.float16, reduce=torch.float32),
                offload=offload,
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            scaler = ec.GradScaler(world.group, init_scale=8.0)

            def step(model: ec.FSDP = model) -> Tensor:
                x = torch.full((2, 6), 1.0 + world.rank)
                return scaler.scale(model(x).float().square().mean())

            step().backward()
            scaler.unscale_(optimizer)
            norm = ec.clip_grad_norm_(model, 1e-3)
            scaler.step(optimizer)
            scaler.update()
            assert norm > 1e-3
            saved = model.state_dict()
            assert all(map(memories.is_host, model.parameters()))
            state = model.optimizer_state_dict(optimizer)
            twin = copy.deepcopy(model)
            with model.full_parameters(writeback=True):
                for param in model.parameters():
                    param.data.fill_(0.5)
            assert all(bool((value == 0.5).all()) for value in model.state_dict().values())
            numel = sum(param.numel() for param in model.parameters())
            model.update_shards(torch.full((numel,), 2.0))
            assert all(bool((value == 2).all()) for value in model.state_dict().values())
            model.load_state_dict(saved)
            model.load_optimizer_state_dict(optimizer, state)
            for name, value in twin.state_dict().items():
                assert torch.equal(value, saved[name])
                assert torch.equal(model.state_dict()[name], value)
            with torch.no_grad():
                assert torch.equal(step(), step(twin))
            assert all(map(memories.is_host, (*model.parameters(), *twin.parameters())))
            for own in optimizer.state.values():
                assert memories.is_host(own["exp_avg"])


def test_masters_may_be_in_another_memory_for_all_that_reads_or_writes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    separate(monkeypatch.setattr)
    ec.run(handles_masters, 2)


# --- on the CPU ----------------------------------------------------------------------------------


def is_nothing(world: World) -> None:
    results = []
    for offload in Offload:
        model = shard(world, precision=LOW, offload=offload, model=build(torch.float32))
        loss_of(model, *batch(0, world.rank)).backward()
        for param in trainable(model):
            assert param.device == param.grad.device == torch.device("cpu")
        grads = [param.grad for param in trainable(model)]
        results.append((model.memory_stats(), grads))
    for stats, grads in results[1:]:
        assert stats == results[0][0]
        assert stats.offloaded == 0
        assert all(map(torch.equal, grads, results[0][1]))


def test_where_host_and_device_are_one_nothing_changes() -> None:
    ec.run(is_nothing, 2)


def test_what_contradicts_itself_is_refused() -> None:
    def main(world: World) -> None:
        with pytest.raises(ArgumentError, match="^offload is 'ALL'"):
            shard(world, offload="ALL")
        with pytest.raises(ArgumentError, match=r"Strategy\.NO_SHARD keeps .* Offload\.ALL keeps"):
            shard(world, strategy=ec.Strategy.NO_SHARD, offload=Offload.ALL)

    ec.run(main, 1)
