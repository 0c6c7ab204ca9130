"""PyTorch's DDP, FSDP2, DTensor, pipeline and checkpoints, unchanged, on the backend ``echelon``.

Each runs beside gloo on the same ranks, or beside one process with the data of all ranks. Sums over
ranks run in another order there, so results agree to the default tolerance.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from tests.c10d.ranks import Ranks

# What is used first there; and optimizers and DDP import the compiler.
IMPORTED_BY_RANKS = ("torch._dynamo", "torch.distributed.optim", "torch.distributed.pipelining")

BATCH = 6
STEPS = 3


class Net(nn.Module):
    """Layers of unequal, odd sizes, with a buffer that batches change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 33, bias=False)
        self.norm = nn.BatchNorm1d(33)
        self.middle = nn.Linear(33, 33, bias=False)
        self.last = nn.Linear(33, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.middle(x)))


class Plain(nn.Sequential):
    """The same without a buffer, so that the whole batch gives what the ranks' parts give."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 3))


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randn(BATCH, n, generator=generator) for n in (7, 3))  # type: ignore[return-value]


def train(model: nn.Module, ranks: list[int], optimizer: Any = None) -> nn.Module:
    """Some steps on the data of ``ranks``, concatenated."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        inputs, targets = (
            torch.cat(parts) for parts in zip(*(batch(step, r) for r in ranks), strict=True)
        )
        mse_loss(model(inputs).to(targets.dtype), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same_state(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert_close(full, wanted[name], msg=lambda text, name=name: f"{name}: {text}")


@cache
def gloo() -> dist.ProcessGroup:
    """One group of gloo for all tests of a rank.

    PyTorch's reducer drops its group while it holds the interpreter. If it is the last owner, the
    destructor and gloo's thread, which needs the interpreter to drop a future, wait for each other.
    """
    return dist.new_group(backend="gloo")


# --- DDP ---------------------------------------------------------------------------------------

DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "a bucket for each parameter": {"bucket_cap_mb": 1e-4},
    "gradients as views of buckets": {"gradient_as_bucket_view": True},
    "unused parameters searched": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


def train_ddp(rank: int, size: int, options: dict[str, Any]) -> None:
    models = []
    other = gloo()
    for group in (dist.group.WORLD, other):
        torch.manual_seed(rank)  # DDP must make the weights equal
        model = DistributedDataParallel(Net(), process_group=group, **options)
        models.append(train(model, [rank]).module)
    assert_same_state(models[0].state_dict(), models[1].state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("options", DDP_OPTIONS.values(), ids=DDP_OPTIONS)
def test_ddp_trains_as_over_gloo(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.call(train_ddp, options)


def train_ddp_beside_one_process(rank: int, size: int) -> None:
    model = train(DistributedDataParallel(build(Plain)), [rank])
    alone = train(build(Plain), list(range(size)))
    assert_same_state(model.module.state_dict(), alone.state_dict())


def test_ddp_gives_the_weights_of_one_process_with_all_data(ranks: Ranks) -> None:
    ranks.call(train_ddp_beside_one_process)


def reduce_in_bfloat16(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Like PyTorch's compression hook, which it gives to NCCL only."""
    half = bucket.buffer().to(torch.bfloat16).div_(group.size())
    future = dist.all_reduce(half, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def train_ddp_with_hook(rank: int, size: int) -> None:
    model = DistributedDataParallel(build(Plain), bucket_cap_mb=1e-4)
    model.register_comm_hook(dist.group.WORLD, reduce_in_bfloat16)
    model(batch(0, rank)[0]).sum().backward()
    alone = build(Plain)
    torch.stack([alone(batch(0, r)[0]).sum() for r in range(size)]).mean().backward()
    for found, wanted in zip(model.module.parameters(), alone.parameters(), strict=True):
        assert_close(found.grad, wanted.grad, rtol=0.05, atol=0.05)  # bfloat16 has 8 bits


def test_ddp_communication_hooks_chain_the_futures_of_the_backend(ranks: Ranks) -> None:
    ranks.call(train_ddp_with_hook)


def train_ddp_uneven(rank: int, size: int) -> None:
    gradients = []
    other = gloo()
    for group in (dist.group.WORLD, other):
        model = DistributedDataParallel(
            build(Plain), process_group=group, find_unused_parameters=True
        )
        with Join([model]):
            for step in range(rank + 1):  # rank 0 has one batch, rank 3 has four
                mse_loss(model(batch(step, rank)[0]), batch(step, rank)[1]).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert_close(*gradients)


def test_ddp_joins_ranks_with_different_numbers_of_batches(ranks: Ranks) -> None:
    ranks.call(train_ddp_uneven)


def train_with_zero(rank: int, size: int) -> None:
    # Its module warns when it is imported, which is an error here but not on the ranks.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(build(Plain))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    train(model, [rank], optimizer)
    alone = train(build(Plain), list(range(size)))
    assert_same_state(model.module.state_dict(), alone.state_dict())


def test_the_zero_redundancy_optimizer_gives_the_weights_of_one_process(ranks: Ranks) -> None:
    ranks.call(train_with_zero)


# --- FSDP2 -------------------------------------------------------------------------------------


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def train_fsdp(rank: int, size: int, axes: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard")[-len(axes) :])
    assert {dist.get_backend(group) for group in mesh.get_all_groups()} == {"echelon"}
    model = train(shard(build(Plain), mesh=mesh), [rank])
    alone = train(build(Plain), list(range(size)))
    assert_same_state(model.state_dict(), alone.state_dict())
    model(batch(9, rank)[0]).sum().backward()
    torch.stack([alone(batch(9, r)[0]).sum() for r in range(size)]).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert_close(norm.full_tensor(), nn.utils.clip_grad_norm_(alone.parameters(), 0.1))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(4,), (2, 2)], ids=["sharded", "hybrid"])
def test_fsdp2_gives_the_weights_of_one_process_with_all_data(
    ranks: Ranks, axes: tuple[int, ...]
) -> None:
    ranks.call(train_fsdp, axes)


def train_fsdp_mixed(rank: int, size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    states = []
    other = gloo()
    for group in (dist.group.WORLD, other):
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        model = train(shard(build(Plain), mesh=mesh, mp_policy=policy), [rank])
        states.append({k: v.full_tensor() for k, v in model.state_dict().items()})
    assert_same_state(*states)


@pytest.mark.slow
def test_fsdp2_in_bfloat16_trains_as_over_gloo(ranks: Ranks) -> None:
    ranks.call(train_fsdp_mixed)


# --- DTensor and functional collectives --------------------------------------------------------


def redistribute(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(70.0).view(7, 10)  # neither dim is a multiple of the ranks
    layouts = [Shard(0), Shard(1), Replicate()]
    for first in layouts:
        tensor = distribute_tensor(whole if rank == 0 else torch.zeros(7, 10), mesh, [first])
        for second in layouts:
            moved = tensor.redistribute(placements=[second])
            assert torch.equal(moved.full_tensor(), whole)
    mine = torch.full((5, 3), float(rank))
    for layout in layouts:
        partial = DTensor.from_local(mine, mesh, [Partial()])
        total = partial.redistribute(placements=[layout])
        assert torch.equal(total.full_tensor(), torch.full((5, 3), float(sum(range(size)))))
    weight = distribute_tensor(torch.arange(50.0).view(10, 5), mesh, [Shard(0)]).requires_grad_()
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ weight
    assert_close(product.full_tensor(), whole @ torch.arange(50.0).view(10, 5))
    product.redistribute(placements=[Replicate()]).sum().backward()
    assert_close(weight.grad.full_tensor(), whole.sum(0).view(-1, 1).expand(10, 5))


def test_dtensors_move_between_all_layouts(ranks: Ranks) -> None:
    ranks.call(redistribute)


def functional_collective(name: str, former_name: str) -> Callable[..., Any]:
    """One of them by its name, which it does not have in torch 2.11."""
    return getattr(functional, name, None) or getattr(functional, former_name)


def call_functional(rank: int, size: int) -> None:
    all_gather_single = functional_collective("all_gather_single", "all_gather_tensor")
    reduce_scatter_single = functional_collective("reduce_scatter_single", "reduce_scatter_tensor")
    all_gather_single_coalesced = functional_collective(
        "all_gather_single_coalesced", "all_gather_into_tensor_coalesced"
    )
    reduce_scatter_single_coalesced = functional_collective(
        "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
    )
    group = dist.group.WORLD
    every = torch.arange(size, dtype=torch.float32)
    mine = torch.full((3,), float(rank))
    assert torch.equal(
        functional.all_reduce(mine, "sum", group), torch.full((3,), float(every.sum()))
    )
    assert torch.equal(
        functional.all_reduce(mine, "avg", group), torch.full((3,), every.mean().item())
    )
    gathered = all_gather_single(mine, 0, group)
    assert torch.equal(gathered, every.repeat_interleave(3))
    scattered = reduce_scatter_single(gathered + rank, "sum", 0, group)
    assert torch.equal(scattered, torch.full((3,), size * rank + every.sum().item()))
    assert torch.equal(functional.broadcast(mine, 2, group), torch.full((3,), 2.0))
    exchanged = functional.all_to_all_single(gathered, [3] * size, [3] * size, group)
    assert torch.equal(exchanged, torch.full((3 * size,), float(rank)))
    sums = functional.all_reduce_coalesced([mine, mine + 1], "sum", group)
    assert [t[0].item() for t in sums] == [every.sum(), every.sum() + size]
    parts = all_gather_single_coalesced([mine, every[:1] + rank], group)
    assert torch.equal(parts[1], every)
    pieces = reduce_scatter_single_coalesced([gathered, every], "sum", [0, 0], group)
    assert torch.equal(pieces[1], every[rank : rank + 1] * size)


def test_functional_collectives_reach_the_backend_from_c_plus_plus(ranks: Ranks) -> None:
    ranks.call(call_functional)


# --- pipelining --------------------------------------------------------------------------------


def run_pipeline(rank: int, size: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(size)]
    inputs, targets = torch.randn(8, 7), torch.randn(8, 7)
    whole = nn.Sequential(*layers)
    wanted = mse_loss(whole(inputs), targets)
    wanted.backward()
    expected = [p.grad.clone() for p in layers[rank].parameters()]
    whole.zero_grad()
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    losses: list[Tensor] = []
    schedule = Schedule1F1B(stage, 4, loss_fn=mse_loss)
    if rank == 0:
        schedule.step(inputs)
    elif rank == size - 1:
        schedule.step(target=targets, losses=losses)
        assert_close(torch.stack(losses).mean(), wanted)
    else:
        schedule.step()
    assert_close([p.grad for p in layers[rank].parameters()], expected)


def test_pytorchs_pipeline_runs_on_its_messages(ranks: Ranks) -> None:
    ranks.call(run_pipeline)


# --- checkpoints -------------------------------------------------------------------------------


def save_and_load(rank: int, size: int, folder: str) -> None:
    model = shard(build(Plain))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, [rank], optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    wanted = train(model, [rank], optimizer).state_dict()  # what an uninterrupted run gives

    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    other = shard(Plain(), mesh=mesh)  # sharded over two ranks instead of four
    resumed = torch.optim.AdamW(other.parameters(), lr=0.05)
    model_state, optimizer_state = get_state_dict(other, resumed)
    state = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        other, resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    train(other, [rank], resumed)
    assert_same_state(other.state_dict(), {k: v.full_tensor() for k, v in wanted.items()})


@pytest.mark.slow
def test_a_distributed_checkpoint_resumes_on_another_mesh(ranks: Ranks, tmp_path: Path) -> None:
    ranks.call(save_and_load, str(tmp_path / "checkpoint"))
