"""Sums of sparse tensors over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.sparse import check_sparse_tensor_invariants

import echelon as ec
from echelon.errors import UnsupportedError


def entries(rank: int) -> Tensor:
    """A tensor whose places and number of entries differ from rank to rank, one of them double."""
    places = torch.tensor([[rank, rank, *range(rank)], [0, 0, *range(rank)]])
    values = torch.arange(2.0 * (2 + rank), dtype=torch.float64).reshape(2 + rank, 2) + rank
    with check_sparse_tensor_invariants():  # torch 2.11 warns in spite of check_invariants=True
        return torch.sparse_coo_tensor(places, values, (4, 4, 2))


def sums(world: ec.World) -> tuple[bool, Tensor]:
    dist.init_process_group("gloo")
    tensor = entries(world.rank)
    dist.all_reduce(tensor)
    return tensor.is_coalesced(), tensor.to_dense()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_the_sum_has_the_entries_of_all_ranks(kind: str) -> None:
    wanted = sum(entries(rank).to_dense() for rank in range(3))
    for is_coalesced, total in ec.run(sums, 3, kind):
        assert is_coalesced
        assert torch.equal(total, wanted)


def trains(world: ec.World) -> Tensor:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(8, 2, sparse=True, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        model(torch.tensor([world.rank, step])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.weight.detach()


def trains_alone() -> Tensor:
    torch.manual_seed(0)
    model = nn.Embedding(8, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        parts = [model(torch.tensor([rank, step])).square().sum() for rank in range(2)]
        (sum(parts) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


def test_ddp_trains_an_embedding_with_sparse_gradients_as_one_process_does() -> None:
    for weights in ec.run(trains, 2):
        torch.testing.assert_close(weights, trains_alone(), rtol=1e-12, atol=1e-12)  # other sums


def reduces(world: ec.World, op: dist.ReduceOp.RedOpType) -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(entries(world.rank), op)


def test_other_reductions_are_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match=r"all_reduce\(max\).*call .to_dense\(\)"):
        ec.run(reduces, 2, args=(dist.ReduceOp.MAX,))
