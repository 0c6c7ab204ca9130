"""Reductions and timeouts of c10d have a name and seconds of ours, and scaled sums scale a copy."""

from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import ReduceOp

from echelon.c10d.translate import copy_all, joined, reduction, seconds_of


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [(250, 0.25), (60_000, 60.0), (0, None), (-1, None)]
)
def test_a_timeout_that_c10d_calls_unset_is_none(milliseconds: int, seconds: float | None) -> None:
    assert seconds_of(timedelta(milliseconds=milliseconds)) == seconds


def test_a_premultiplied_sum_is_the_sum_of_scaled_copies() -> None:
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    name, (scaled,) = reduction(_make_nccl_premul_sum(3.0), [tensor])
    assert (name, scaled.tolist(), scaled.requires_grad) == ("sum", [3.0, 6.0], False)
    assert tensor.tolist() == [1.0, 2.0]
    name, (same,) = reduction(ReduceOp(ReduceOp.AVG), [tensor])
    assert name == "mean"
    assert same is tensor


def test_joined_tensors_are_copied_back_into_their_shapes() -> None:
    tensors = [torch.arange(4.0).view(2, 2).t(), torch.tensor(9.0)]
    buffer = joined(tensors)
    assert buffer.tolist() == [0.0, 2.0, 1.0, 3.0, 9.0]
    targets = [torch.zeros(2, 2), torch.zeros(())]
    copy_all(targets, buffer.split([4, 1]))
    assert torch.equal(targets[0], tensors[0])
    assert targets[1].item() == 9.0
