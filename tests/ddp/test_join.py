"""Ranks with different numbers of batches, in every combination with the other features."""

import pytest
import torch
from torch import nn

import echelon as ec
from tests.ddp.checks import SMALL
from tests.ddp.models import assert_tensor_close, mlp, rows


def data(num_batches):
    """For each rank its batches; no two are alike."""
    return [
        [rows(100 * rank + i, 1, per_rank=3) for i in range(num)]
        for rank, num in enumerate(num_batches)
    ]


def train_plain(batches, reduction="mean"):
    """The weights of one process: batch i is that of all ranks that still have one."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(max(map(len, batches))):
        parts = [rank_batches[i] for rank_batches in batches if i < len(rank_batches)]
        loss = model(torch.cat(parts)).pow(2).mean()
        optimizer.zero_grad()
        (loss * (len(parts) if reduction == "sum" else 1)).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize(
    ("num_batches", "reduction"),
    [
        *(((3, 1), "mean"), ((1, 3), "mean"), ((0, 2), "mean"), ((0, 0), "mean")),
        *(((4, 1, 2), "mean"), ((2, 2, 2, 5), "mean"), ((1, 3), "sum")),
    ],
)
@pytest.mark.parametrize("sync", ["overlap", "manual"])
def test_a_reduction_is_over_the_ranks_that_still_have_a_batch(num_batches, reduction, sync):
    batches = data(num_batches)

    def main(world):
        ddp = ec.DDP(mlp(), world.group, sync=sync, reduction=reduction, **SMALL)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        with ddp.join():
            for x in batches[world.rank]:
                optimizer.zero_grad()
                ddp(x).pow(2).mean().backward()
                if sync == "manual":
                    ddp.sync_gradients()
                optimizer.step()
        return [param.detach() for param in ddp.parameters()]

    expected = train_plain(batches, reduction)
    for params in ec.run(main, len(num_batches)):
        for param, there in zip(params, expected, strict=True):
            assert_tensor_close(param, there.detach(), 1e-11, "parameter")


def test_accumulation_under_no_sync_announces_only_what_is_reduced():
    # Two batches a step; rank 0 has one step, rank 1 has two.
    batches = data((2, 4))

    def main(world):
        ddp = ec.DDP(mlp(), world.group, **SMALL)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        local_batches = batches[world.rank]
        with ddp.join():
            for first, second in zip(local_batches[::2], local_batches[1::2], strict=True):
                optimizer.zero_grad()
                with ddp.no_sync():
                    (ddp(first).pow(2).mean() / 2).backward()
                (ddp(second).pow(2).mean() / 2).backward()
                optimizer.step()
        return [param.detach() for param in ddp.parameters()]

    plain = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for parts in ([*batches[0], *batches[1][:2]], batches[1][2:]):
        optimizer.zero_grad()
        plain(torch.cat(parts)).pow(2).mean().backward()
        optimizer.step()
    for params in ec.run(main, 2):
        for param, there in zip(params, plain.parameters(), strict=True):
            assert_tensor_close(param, there.detach(), 1e-12, "parameter")


@pytest.mark.parametrize("reduction", ["sum", 2.0])
@pytest.mark.parametrize("sync", ["overlap", "manual"])
def test_a_share_of_what_is_reduced_is_refused_where_ranks_may_leave(reduction, sync):
    def main(world):
        ddp = ec.DDP(mlp(), world.group, reduction=reduction, sync=sync, **SMALL)

        def step(seed):
            ddp(rows(seed, 1, per_rank=3)).pow(2).mean().backward()
            if sync == "manual":
                ddp.sync_gradients()

        with ddp.join():
            step(world.rank)
            if world.rank == 1:
                ddp.zero_grad(set_to_none=False)
                step(2)
                ddp.zero_grad()
                step(3)
                torch.autograd.grad(ddp(rows(4, 1, per_rank=3)).sum(), list(ddp.parameters()))
                with ddp.no_sync(), pytest.raises(ec.StateError, match="share of this rank"):
                    ddp(rows(5, 1, per_rank=3)).sum().backward()

    ec.run(main, 2)


def test_buffers_come_from_a_rank_that_still_has_batches():
    def main(world):
        ddp = ec.DDP(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), world.group)
        with ddp.join():
            for step in range(1 if world.rank == 0 else 4):
                x = rows(step + 10 * world.rank, 1, per_rank=4, dtype=torch.float32)
                ddp(x).pow(2).sum().backward()
        norm = ddp.module[1]
        return norm.num_batches_tracked.item(), norm.running_mean

    results = ec.run(main, 3)
    assert [calls for calls, _ in results] == [4, 4, 4]
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][1], results[2][1])


def test_training_goes_on_after_join():
    def main(world):
        ddp = ec.DDP(mlp(), world.group, **SMALL)
        for _ in range(2):
            with ddp.join():
                for step in range(1 + world.rank):
                    ddp.zero_grad()
                    ddp(rows(step, 1)).sum().backward()
            ddp.zero_grad()
            ddp(rows(world.rank, 1)).sum().backward()
        return [param.grad.clone() for param in ddp.parameters()]

    a, b = ec.run(main, 2)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_join_inside_join_is_refused():
    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        with (
            ddp.join(),
            pytest.raises(ec.StateError, match=r"join\(\) inside join\(\)"),
            ddp.join(),
        ):
            pass

    ec.run(main, 2)


def test_ranks_at_different_points_of_a_step_are_told_so():
    def main(world):
        ddp = ec.DDP(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), world.group)
        x = rows(0, 1, per_rank=4, dtype=torch.float32)
        with ddp.join():
            out = ddp(x).sum()
            out.backward(retain_graph=True)
            if world.rank == 0:
                out.backward()  # a second backward, where the other rank goes on to forward
            ddp(x)

    with pytest.raises(ec.StateError, match="rank 0 reduces gradients\n  rank 1 runs forward"):
        ec.run(main, 2)


def test_an_error_inside_join_is_the_error_of_the_run():
    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        with ddp.join():
            if world.rank == 1:
                raise KeyError("no such batch")
            ddp(rows(0, 1)).sum().backward()

    with pytest.raises(KeyError, match="no such batch"):
        ec.run(main, 2)


def test_a_barrier_every_few_batches_names_a_batch_that_one_rank_has_left_out():
    trained = []

    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        for index in range(12):
            if index % 4 == 0:
                world.group.barrier(label=f"batch {index}")
            if world.rank == 1 and index == 2:
                continue
            ddp(rows(index, 1, per_rank=3)).sum().backward()
            trained.append(index)

    with pytest.raises(ec.CollectiveMismatch, match="No majority says which rank is right") as info:
        ec.run(main, 2)
    assert "rank 0: all_reduce(mean)" in str(info.value)
    assert "rank 1: barrier of 'batch 4'" in str(info.value)
    assert max(trained) < 4
