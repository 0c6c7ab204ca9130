"""What must hold for DDP in every world, as functions of one rank.

Each takes a world, builds rank-dependent data, and asserts. They are module-level, because
processes import them by name; ``run_all`` puts them all into one start.
"""

import copy
import importlib
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

import echelon as ec
from tests.ddp.models import (
    Casting,
    Checkpointed,
    TiedLanguageModel,
    TwoPaths,
    assert_close,
    assert_tensor_close,
    gradients,
    mlp,
    rows,
    share,
    token_loss,
    tokens,
)
from tests.worlds import events_of

SMALL = {"bucket_bytes": 300, "first_bucket_bytes": 100}  # several buckets for the smallest models

Check = Callable[[ec.World], None]
CHECKS: dict[str, Check] = {}


def check(fn: Check) -> Check:
    """Put a rank function into the list of checks."""
    CHECKS[fn.__name__] = fn
    return fn


def run_all(world: ec.World) -> int:
    """Run every check, one after another; a failure says which."""
    importlib.import_module("tests.ddp.replica_checks")  # has more of them
    for name, fn in CHECKS.items():
        try:
            fn(world)
        except Exception as error:
            error.add_note(f"in check {name}")
            raise
    return len(CHECKS)


def mean_over_ranks(world: ec.World, value: Callable[[int], float]) -> float:
    """The mean of a function of the rank."""
    return sum(value(rank) for rank in range(world.size)) / world.size


def train_beside_plain(
    world: ec.World, model: nn.Module, steps: int, wrap: Callable[[nn.Module], ec.DDP]
) -> tuple[ec.DDP, nn.Module, list[tuple[float, float]]]:
    """Train ``model`` in DDP and a copy on all batches together; losses of both, step by step."""
    plain = copy.deepcopy(model)
    ddp = wrap(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ddp, plain)]
    losses = []
    for step in range(steps):
        inputs, targets = tokens(step, world.size)
        local_batch = [share(t, world.rank, world.size) for t in (inputs, targets)]
        whole = token_loss(plain, inputs, targets)
        local = token_loss(ddp, *local_batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole.backward()
        local.backward()
        for optimizer in optimizers:
            optimizer.step()
        mean = local.detach().clone()
        world.group.all_reduce(mean, "mean")
        losses.append((mean.item(), whole.item()))
    return ddp, plain, losses


@check
def training_equals_one_process_in_float64(world: ec.World) -> None:
    torch.manual_seed(0)
    ddp, plain, losses = train_beside_plain(
        world, TiedLanguageModel().double(), 5, lambda m: ec.DDP(m, world.group, **SMALL)
    )
    assert len(ddp.buckets) > 3
    for mean, whole in losses:
        assert abs(mean - whole) <= 1e-12 * abs(whole)
    assert_close(ddp, plain, rtol=1e-11)


@check
def training_equals_one_process_in_float32(world: ec.World) -> None:
    torch.manual_seed(0)
    ddp, plain, losses = train_beside_plain(
        world, TiedLanguageModel(), 5, lambda m: ec.DDP(m, world.group)
    )
    for mean, whole in losses:
        torch.testing.assert_close(torch.tensor(mean), torch.tensor(whole))
    for param, expected in zip(ddp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, expected)


@check
def all_ranks_hold_the_same_bits(world: ec.World) -> None:
    torch.manual_seed(world.rank)  # different at first: rank 0's weights go to all
    ddp, _, _ = train_beside_plain(
        world, TiedLanguageModel(), 3, lambda m: ec.DDP(m, world.group, **SMALL)
    )
    for tensor in [*ddp.parameters(), *gradients(ddp).values()]:
        assert tensor is not None
        of_rank_0 = tensor.detach().clone()
        world.group.broadcast(of_rank_0, 0)
        assert torch.equal(of_rank_0, tensor)


def train_overlapped_beside_manual(world: ec.World, steps: int, sizes: Mapping[str, int]) -> ec.DDP:
    """Both give the same bits; returns the model that overlaps."""
    overlapped = ec.DDP(mlp(torch.float32), world.group, **sizes)
    manual = ec.DDP(mlp(torch.float32), world.group, sync="manual", **sizes)
    for step in range(steps):
        x = share(rows(step, world.size, dtype=torch.float32), world.rank, world.size)
        for model in (overlapped, manual):
            model.zero_grad()
            model(x).pow(2).sum().backward()
        manual.sync_gradients()
        for a, b in zip(overlapped.parameters(), manual.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    return overlapped


@check
def overlap_and_manual_give_the_same_bits(world: ec.World) -> None:
    train_overlapped_beside_manual(world, 5, SMALL)


@check
def unused_parameters_are_tolerated(world: ec.World) -> None:
    torch.manual_seed(0)
    ddp = ec.DDP(TwoPaths(), world.group, **SMALL)
    frozen = ddp.frozen.weight.clone()
    for _ in range(3):
        ddp.zero_grad()
        x = torch.full((2, 3), float(world.rank + 1))
        ddp(x, "a" if world.rank == 0 else "b").sum().backward()
        assert ddp.never.weight.grad is None
        assert ddp.frozen.weight.grad is None
        # The gradient of a bias is the number of rows; only rank 0 used a, all others b.
        assert torch.equal(ddp.a.bias.grad, torch.tensor([2 / world.size]))
        if world.size > 1:
            expected = torch.tensor([2 * (world.size - 1) / world.size])
            torch.testing.assert_close(ddp.b.bias.grad, expected)
        other = "b" if world.rank == 0 else "a"
        unused = ddp.unused_parameters()
        assert {f"{other}.weight", "never.bias"} <= set(unused.here)
        assert ("b.weight" in unused.everywhere) == (world.size == 1)
        assert {"never.weight", "never.bias"} <= set(unused.everywhere)
    assert torch.equal(ddp.frozen.weight, frozen)


@check
def accumulation_reduces_the_whole_sum(world: ec.World) -> None:
    plain = mlp()
    ddp = ec.DDP(mlp(), world.group, **SMALL)
    for step in range(3):
        plain.zero_grad()
        ddp.zero_grad(set_to_none=step != 1)
        for i in range(3):
            x = rows(10 * step + i, world.size)
            plain(x).pow(2).mean().backward()
            loss = ddp(share(x, world.rank, world.size)).pow(2).mean()
            if i < 2:
                with ddp.no_sync():
                    loss.backward()
            else:
                loss.backward()
        assert_close(ddp, plain)


@check
def buffers_follow_rank_0_when_they_changed(world: ec.World) -> None:
    ddp = ec.DDP(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), world.group)
    norm = ddp.module[1]
    for step in range(3):
        x = share(rows(step, world.size, per_rank=4, dtype=torch.float32), world.rank, world.size)
        ddp(x).pow(2).mean().backward()
    ddp(x)  # this forward begins with the buffers of rank 0
    expected = 0.9 * norm_before_last(world, ddp) + 0.1 * ddp.module[0](x).mean(0).detach()
    torch.testing.assert_close(norm.running_mean, expected)


def norm_before_last(world: ec.World, ddp: ec.DDP) -> torch.Tensor:
    """The running mean that rank 0 had before its last forward."""
    x = share(rows(2, world.size, per_rank=4, dtype=torch.float32), world.rank, world.size)
    mean = (ddp.module[1].running_mean - 0.1 * ddp.module[0](x).mean(0).detach()) / 0.9
    world.group.broadcast(mean, 0)
    return mean


@check
def gradients_travel_in_bfloat16_when_asked(world: ec.World) -> None:
    plain = mlp(torch.float32)
    ddp = ec.DDP(mlp(torch.float32), world.group, gradient_dtype=torch.bfloat16, **SMALL)
    for step in range(3):
        x = rows(step, world.size, dtype=torch.float32)
        plain.zero_grad()
        ddp.zero_grad()
        plain(x).pow(2).mean().backward()
        ddp(share(x, world.rank, world.size)).pow(2).mean().backward()
        for param, expected in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert param.grad.dtype is torch.float32
            assert torch.equal(param.grad, param.grad.bfloat16().float())
            # bfloat16 keeps 8 bits: each of the parts and the sum is off by up to 2**-8.
            assert_tensor_close(param.grad, expected.grad, 0.02, "gradient")


@check
def every_reduction_divides_as_it_says(world: ec.World) -> None:
    size = world.size
    for reduction, divisor in (("mean", size), ("sum", 1), (5, 5), (0.5, 0.5)):
        ddp = ec.DDP(nn.Linear(1, 1, bias=False), world.group, reduction=reduction)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((1, 1), world.rank + 1.0)).sum().backward()
            total = sum(rank + 1.0 for rank in range(size))
            torch.testing.assert_close(ddp.weight.grad, torch.tensor([[total / divisor]]))


@check
def a_second_backward_adds_to_the_reduced_gradient(world: ec.World) -> None:
    for reduction in ("mean", "sum", 3):
        once = ec.DDP(mlp(), world.group, reduction=reduction, **SMALL)
        twice = ec.DDP(mlp(), world.group, reduction=reduction, **SMALL)
        expected: dict[str, torch.Tensor] = {}
        for step in range(3):
            x = share(rows(step, world.size), world.rank, world.size)
            once.zero_grad()
            once(x).pow(2).sum().backward()
            for name, grad in gradients(once).items():
                assert grad is not None
                expected[name] = expected[name] + grad if name in expected else grad
            twice(x).pow(2).sum().backward()
        for name, grad in gradients(twice).items():
            assert grad is not None
            assert_tensor_close(grad, expected[name], 1e-14, name)


@check
def ranks_may_have_different_numbers_of_batches(world: ec.World) -> None:
    # Rank r has r + 1 batches; in one process, batch i is that of all ranks that still have one.
    plain, ddp = mlp(), ec.DDP(mlp(), world.group, **SMALL)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ddp, plain)]
    data = [
        [rows(100 * rank + i, 1, per_rank=3) for i in range(rank + 1)] for rank in range(world.size)
    ]
    with ddp.join():
        for x in data[world.rank]:
            optimizers[0].zero_grad()
            ddp(x).pow(2).mean().backward()
            optimizers[0].step()
    for i in range(world.size):
        optimizers[1].zero_grad()
        whole = torch.cat([batches[i] for batches in data if i < len(batches)])
        plain(whole).pow(2).mean().backward()
        optimizers[1].step()
    for param, expected in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert_tensor_close(param.detach(), expected.detach(), 1e-11, "parameter")


@check
def broadcast_parameters_writes_in_place(world: ec.World) -> None:
    src = world.size - 1
    torch.manual_seed(world.rank)
    ddp = ec.DDP(nn.BatchNorm1d(3), world.group, init="trust")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    for tensor in [*ddp.parameters(), ddp.running_mean]:
        nn.init.constant_(tensor, world.rank)
    pointers = [param.data_ptr() for param in ddp.parameters()]
    ddp.broadcast_parameters(src)
    assert [param.data_ptr() for param in ddp.parameters()] == pointers
    for tensor in [*ddp.parameters(), ddp.running_mean]:
        assert tensor.tolist() == [src] * 3
    ddp.weight.grad = torch.ones(3)
    optimizer.step()
    assert ddp.weight.tolist() == [src - 1] * 3


@check
def sync_gradients_averages_what_grad_holds(world: ec.World) -> None:
    module = nn.ParameterDict({"w": torch.tensor([1.0, 2.0, 3.0])})
    ddp = ec.DDP(module, world.group, sync="manual")
    module["w"].grad = torch.full((3,), float(world.rank))
    ddp.sync_gradients()
    expected = mean_over_ranks(world, float)
    assert module["w"].grad.tolist() == [expected] * 3


@check
def both_kinds_of_checkpointing_work(world: ec.World) -> None:
    for reentrant in (False, True):
        plain = mlp()
        ddp = ec.DDP(Checkpointed(mlp(), reentrant), world.group, **SMALL)
        for step in range(3):
            x = rows(step, world.size).requires_grad_()
            plain.zero_grad()
            ddp.zero_grad()
            plain(x).pow(2).mean().backward()
            ddp(share(x, world.rank, world.size)).pow(2).mean().backward()
            assert_close(ddp.module.inner, plain)


@check
def different_models_are_refused_on_every_rank(world: ec.World) -> None:
    if world.size == 1:
        return
    width = 3 if world.rank == world.size - 1 else 4
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, width))
    with pytest.raises(ec.ModelMismatch, match=r"parameter '1\.weight'") as info:
        ec.DDP(model, world.group)
    assert info.value.found[0] == "float32[4, 4]"
    assert info.value.found[world.size - 1] == "float32[3, 4]"


@check
def parameters_of_many_dtypes_train_together(world: ec.World) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3).to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float32)]
    plain = Casting(*layers)
    ddp = ec.DDP(copy.deepcopy(plain), world.group)
    assert {bucket.dtype for bucket in ddp.buckets} == {p.dtype for p in plain.parameters()}
    for model in (plain, ddp):
        model(torch.full((2, 3), float(world.rank + 1))).sum().backward()
    for param, local in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert local.grad is not None
        expected = local.grad.clone()
        world.group.all_reduce(expected, "mean")
        assert torch.equal(param.grad, expected)


@check
def the_number_of_collectives_and_their_bytes_follow_from_the_buckets(world: ec.World) -> None:
    model = nn.Sequential(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.Linear(17, 2))
    ddp = ec.DDP(model, world.group, **SMALL)
    x = torch.randn(4, 6)
    for _ in range(2):  # the second backward makes the buckets anew
        ddp(x).sum().backward()
    world.group.barrier()
    with events_of(world.rank, "collective.issue") as events:
        ddp.zero_grad()
        ddp(x).sum().backward()
    expected = []
    if world.size > 1:
        expected += [("broadcast", 2 * 17 * 4), ("broadcast", 8)]  # two float buffers, one integer
        for bucket in ddp.buckets:
            numels = [dict(model.named_parameters())[name].numel() for name in bucket.names]
            numel = sum(-(-n // 16) * 16 for n in numels[:-1]) + numels[-1]  # aligned to 16
            expected.append(("all_reduce", 4 * (numel + len(numels) + 6)))  # flags and notices
    assert [(event.facts["op"], event.facts["nbytes"]) for event in events] == expected


@check
def the_first_bucket_leaves_before_backward_ends(world: ec.World) -> None:
    ddp = ec.DDP(mlp(), world.group, **SMALL)
    log: list[str] = []

    def listener(event: ec.events.Event) -> None:
        if event.facts["rank"] == world.rank:
            log.append(event.name)

    ddp.module[0].weight.register_hook(lambda grad: log.append("last gradient"))
    x = share(rows(0, world.size), world.rank, world.size)
    with ec.events.listen(listener):
        ddp(x).sum().backward()
        log.append("backward returned")
    launch = "collective.issue" if world.size > 1 else "ddp.bucket"
    assert log.index("ddp.backward") < log.index(launch) < log.index("last gradient")
    assert log[-2:] == ["ddp.backward", "backward returned"]
