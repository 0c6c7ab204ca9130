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
from echelon.comm.world import World
from echelon.errors import ArgumentError
from tests.fsdp.checking import shard
from tests.fsdp.models import batch, build, loss_of, train_plain
from tests.fsdp.two_memories import separate, watched
from tests.reference import assert_states_equal
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
    {"layout": "flat"},
    {"layout": "rows", "strategy": ec.Strategy.SHARD_GRAD_OP, "reduction": 3.0, "precision": LOW},
    {"layout": "flat", "precision": LOW, "min_num_params": 100, "accumulate": True},
]


def changed(world: World, cases: list[dict[str, Any]]) -> list[str]:
    """What has other bits with offload than without, and what is not near one process."""
    expected, _ = train_plain(world.size, STEPS, clip=0.1)
    found = []
    for options in cases:
        dtype = torch.float32 if "precision" in options else torch.float64
        plain, seen = train(world, dtype=dtype, **options)
        for offload in (Offload.OPTIMIZER, Offload.ALL):
            state, also = train(world, dtype=dtype, offload=offload, **options)
            assert state.keys() == plain.keys()
            found += [f"{offload} {options} {n}" for n in plain if not plain[n].equal(state[n])]
            found += [
                f"{offload} {options} {a} {b}"
                for a, b in zip(seen, also, strict=True)
                if not a.equal(b)
            ]
    state, _ = train(world, offload=Offload.ALL, layout="rows")
    found += [n for n in expected if not torch.allclose(expected[n], state[n], 1e-11, 1e-12)]
    return found


def apart(world: World) -> tuple[list[str], list[tuple[int, int]]]:
    separate()  # in a process of its own
    return changed(world, CASES), counts(world)


@pytest.fixture(scope="module")
def over_gloo() -> list[tuple[list[str], list[tuple[int, int]]]]:
    return run_world("gloo", apart, 2)


@pytest.mark.slow
def test_over_gloo_offload_changes_no_bit(over_gloo: list[Any]) -> None:
    assert [found for found, _ in over_gloo] == [[], []]


@pytest.mark.slow
def test_over_threads_offload_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    separate(monkeypatch)
    assert ec.run(changed, 2, args=(CASES[1:2],)) == [[], []]


# --- where the bytes are -------------------------------------------------------------------------


def counts(world: World) -> list[tuple[int, int]]:
    """Bytes of parts on the device after a step, found and expected; host bytes are checked."""
    found = []
    for offload, precision in itertools.product(
        (Offload.OPTIMIZER, Offload.ALL), (ec.MixedPrecision(), LOW)
    ):
        with watched() as memories:
            model = shard(world, build(torch.float32), precision=precision, offload=offload)
            optimizer = torch.optim.AdamW(trainable(model), lr=0.05)
            loss_of(model, *batch(0, world.rank)).backward()
            optimizer.step()
            for param in trainable(model):
                tensors = (param, param.grad, optimizer.state[param]["exp_avg"])
                assert all(memories.is_host(one) for one in tensors if one.numel())
            stats = model.memory_stats()
            others = stats.slots + sum(buffer.nbytes for buffer in model.buffers())
            left = memories.device_nbytes() - others
        numel = sum(ec.local_shard(param).numel() for param in model.parameters())
        numel += sum(s.part_numel - s.shard_numel for s in model._storages())  # the padding
        staged = 2 * numel if precision is LOW else 0
        num_trained = sum(ec.local_shard(param).numel() for param in trainable(model))
        assert stats.offloaded == 4 * numel + 4 * num_trained + staged
        assert stats.shards == left
        assert stats.gradients == stats.gathered == 0
        itemsize = 0 if offload is Offload.ALL else 2 if precision is LOW else 4
        found.append((left, itemsize * numel))
    return found


@pytest.mark.slow
def test_the_device_keeps_one_part_or_nothing_between_steps(over_gloo: list[Any]) -> None:
    for _, sizes in over_gloo:
        assert [found for found, _ in sizes] == [expected for _, expected in sizes]
        assert [expected > 0 for _, expected in sizes] == [True, True, False, False]


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

            x = torch.full((2, 6), 1.0 + world.rank)
            scaler.scale(model(x).float().square().mean()).backward()
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
            numel = sum(ec.local_shard(param).numel() for param in model.parameters())
            model.update_shards(torch.full((numel,), 2.0))
            assert all(bool((value == 2).all()) for value in model.state_dict().values())
            model.load_state_dict(saved)
            model.load_optimizer_state_dict(optimizer, state)
            assert_states_equal(twin.state_dict(), saved)
            assert_states_equal(model.state_dict(), saved)
            with torch.no_grad():
                assert torch.equal(model(x), twin(x))
            assert all(map(memories.is_host, (*model.parameters(), *twin.parameters())))
            for own in optimizer.state.values():
                assert memories.is_host(own["exp_avg"])


def test_masters_may_be_in_another_memory_for_all_that_reads_or_writes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    separate(monkeypatch)
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
        with pytest.raises(ArgumentError, match=r"^offload is 'ALL'"):
            shard(world, offload="ALL")
        with pytest.raises(ArgumentError, match=r"Strategy\.NO_SHARD keeps .* Offload\.ALL keeps"):
            shard(world, strategy=ec.Strategy.NO_SHARD, offload=Offload.ALL)

    ec.run(main, 1)
