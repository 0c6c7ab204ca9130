"""Under the rules of NCCL nothing waits in a circle, and all has the bits that it has with tags."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World

STEPS = 3
Wrapped = Callable[[World], nn.Module]
BF16 = ec.MixedPrecision(compute=torch.bfloat16)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 7), nn.Linear(7, 3))


def ddp(**options: Any) -> Wrapped:
    return lambda world: ec.DDP(model(), world.group, **options)


def fsdp(**options: Any) -> Wrapped:
    return lambda world: ec.FSDP(model(), world.group, units=ec.units.by_type(nn.Linear), **options)


def hybrid(strategy: ec.Strategy) -> Wrapped:
    def wrap(world: World) -> nn.Module:
        mesh = world.mesh(replicate=2, shard=-1)
        return ec.FSDP(
            model(),
            mesh["shard"],
            units=ec.units.by_type(nn.Linear),
            strategy=strategy,
            replicate=mesh["replicate"],
        )

    return wrap


CASES: dict[str, Wrapped] = {
    "ddp": ddp(),
    "ddp in small buckets": ddp(bucket_bytes=64, first_bucket_bytes=64),
    "ddp with bfloat16 gradients": ddp(gradient_dtype=torch.bfloat16),
    **{
        f"fsdp {strategy.name} {layout} prefetch {prefetch}": fsdp(
            strategy=strategy, layout=layout, forward_prefetch=prefetch
        )
        for strategy in (
            ec.Strategy.FULL_SHARD,
            ec.Strategy.SHARD_GRAD_OP,
            ec.Strategy.SHARD_OPTIMIZER,
        )
        for layout in ("flat", "rows")
        for prefetch in (0, 1)
    },
    "fsdp NO_SHARD": fsdp(strategy=ec.Strategy.NO_SHARD),
    "fsdp offloaded": fsdp(offload=ec.Offload.ALL),
    "fsdp in bfloat16": fsdp(precision=BF16),
    "fsdp POST": fsdp(backward_prefetch=ec.BackwardPrefetch.POST),
    "hybrid": hybrid(ec.Strategy.HYBRID_SHARD),
    "hybrid zero 2": hybrid(ec.Strategy.HYBRID_SHARD_ZERO2),
}


def train(world: World, case: str) -> list[float]:
    wrapped: Any = CASES[case](world)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    chance, losses = torch.Generator().manual_seed(world.rank), []
    for step in range(STEPS):
        if step == 1:
            with wrapped.no_sync():
                wrapped(torch.randn(4, 6, generator=chance)).sum().backward()
        loss = wrapped(torch.randn(4, 6, generator=chance)).square().mean()
        loss.backward()
        norm = ec.clip_grad_norm_(wrapped, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item()]
    with torch.no_grad():
        losses.append(wrapped(torch.ones(2, 6)).sum().item())
    return losses


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_wrapper_trains_under_the_rules_with_the_same_bits(ranks: int) -> None:
    def main(world: World) -> dict[str, list[float]]:
        return {case: train(world, case) for case in CASES}

    assert ec.run(main, ranks, rules="nccl") == ec.run(main, ranks)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp each microbatch"])
def test_a_pipeline_of_wrapped_stages_trains_under_the_rules_with_the_same_bits(
    schedule: str, wrapper: str
) -> None:
    num_stages = 2 if schedule == "1f1b" else 4

    def main(world: World) -> list[float]:
        torch.manual_seed(0)
        stages: list[nn.Module] = [
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(num_stages)
        ]
        mesh = world.mesh(pp=2, dp=2)
        for n, stage in enumerate(stages):
            if wrapper == "ddp":
                stages[n] = ec.DDP(stage, mesh["dp"])
            else:
                stages[n] = ec.FSDP(stage, mesh["dp"], units=ec.units.by_type(nn.Linear))
        pipe = ec.Pipeline(
            stages,
            mesh["pp"],
            microbatches=4,
            schedule=schedule,
            loss_fn=mse,
            reduce_every="microbatch" if "microbatch" in wrapper else "step",
            replicate=mesh["dp"],
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        chance, losses = torch.Generator().manual_seed(mesh["dp"].rank), []
        for rows in (8, 8, 5, 8):
            x = torch.randn(rows, 4, generator=chance)
            loss = pipe.step(x, target=x, loss_everywhere=True)
            norm = ec.clip_grad_norm_(pipe, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            evaluated = pipe.eval_step(x, target=x, loss_everywhere=True)
            assert loss is not None
            assert evaluated is not None
            losses += [loss.item(), norm.item(), evaluated.item()]
        return losses

    assert ec.run(main, 4, rules="nccl") == ec.run(main, 4)


def test_a_checkpoint_is_saved_and_loaded_under_the_rules(tmp_path: Path) -> None:
    def main(world: World) -> bool:
        wrapped = ec.FSDP(model(), world.group, units=ec.units.by_type(nn.Linear))
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        for step in range(2):
            wrapped(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ec.save(tmp_path / f"{step}", model=wrapped, optimizer=optimizer, step=step)
        saved = [param.clone() for param in wrapped.parameters()]
        optimizer.step()
        ec.load(tmp_path / "1", model=wrapped, optimizer=optimizer)
        return all(map(torch.equal, saved, wrapped.parameters()))

    assert all(ec.run(main, 3, rules="nccl"))


def test_saves_in_the_background_of_training_end_under_the_rules(tmp_path: Path) -> None:
    """Their threads meet on the host, in a group that has tags there."""

    def main(world: World, folder: Path) -> list[float]:
        wrapped = ec.FSDP(model(), world.group, units=ec.units.by_type(nn.Linear))
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            loss = wrapped(torch.ones(2, 6)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            save = ec.async_save(folder / f"{step}", model=wrapped, optimizer=optimizer, step=step)
        losses.append(wrapped(torch.ones(2, 6)).sum().item())
        save.wait()
        ec.load(folder / "1", model=wrapped, optimizer=optimizer)
        return [*losses, wrapped(torch.ones(2, 6)).sum().item()]

    with_tags = ec.run(main, 3, args=(tmp_path / "tags",))
    assert ec.run(main, 3, args=(tmp_path / "nccl",), rules="nccl") == with_tags


def test_a_group_on_the_host_has_tags_and_waits_for_no_device() -> None:
    def main(world: World) -> list[float]:
        host = world.group.subgroup(range(world.size), device="cpu")
        assert host is not None
        assert [host.has_tags, host.shares_memory, world.group.has_tags] == [True, False, False]
        other, received = 1 - world.rank, [torch.zeros(1), torch.zeros(1)]
        arrives = world.group.irecv(received[0], other) if world.rank else None
        host.all_gather_bytes(b"behind a receive")
        works = [host.isend(torch.ones(1), other, tag=tag) for tag in (world.rank, 2)]
        host.recv(received[1], other, tag=2)
        host.recv(received[1], other, tag=other)
        for work in works:
            work.wait()
        if arrives is None:
            world.group.send(torch.ones(1), other)
        else:
            arrives.wait()
        return torch.cat(received).tolist()

    def warm(world: World) -> list[float]:
        (world.group.recv if world.rank else world.group.send)(torch.ones(1), 1 - world.rank)
        return main(world)

    assert ec.run(warm, 2, rules="nccl") == [[0.0, 1.0], [1.0, 1.0]]
