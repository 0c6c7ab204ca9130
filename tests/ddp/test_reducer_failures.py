"""What may go wrong in a backward, and how the reducer says so or goes on."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from tests.ddp.checks import SMALL
from tests.ddp.models import assert_close, gradients, mlp, rows, share


class Failing(torch.autograd.Function):
    """The identity; its backward fails when told to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise KeyError("no backward today")
        return grad, None


class FailsInTheMiddle(nn.Module):
    """Two linear layers with a failure between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        return self.second(Failing.apply(self.first(x), fails))


def test_the_step_after_an_aborted_backward_is_right():
    def main(world):
        torch.manual_seed(0)
        ddp = ec.DDP(FailsInTheMiddle().double(), world.group, bucket_bytes=0, first_bucket_bytes=0)
        x = share(rows(0, 2), world.rank, 2)
        ddp(x, False).sum().backward()
        expected = gradients(ddp)
        for _ in range(3):
            ddp.zero_grad()
            with pytest.raises(KeyError, match="no backward today"):
                ddp(x, True).sum().backward()
            ddp.zero_grad()
            ddp(x, False).sum().backward()
            for name, grad in gradients(ddp).items():
                assert torch.equal(grad, expected[name])

    ec.run(main, 2)


def test_a_failed_forward_on_one_rank_may_be_tried_again():
    def main(world):
        ddp = ec.DDP(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), world.group)
        for step in range(3):
            ddp.zero_grad()
            if world.rank == 0:
                with pytest.raises(RuntimeError, match="mat1 and mat2"):
                    ddp(torch.zeros(2, 5))
            ddp(share(rows(step, 2, dtype=torch.float32), world.rank, 2)).sum().backward()

    ec.run(main, 2)


class Shared(nn.Module):
    """One layer twice, each time in a reentrant checkpoint: two gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.first(x)


def test_a_second_gradient_after_its_bucket_left_is_an_error_with_a_way_out():
    def main(world):
        ddp = ec.DDP(Shared().double(), world.group, bucket_bytes=0, first_bucket_bytes=0)
        x = rows(0, 1).requires_grad_()
        for _ in range(2):  # at first the bucket of "shared" waits for that of "first"
            ddp(x).sum().backward()

    with pytest.raises(
        ec.StateError, match=r"'shared.\w+' got a second gradient.*use_reentrant=Fal"
    ):
        ec.run(main, 2)


def test_a_second_gradient_before_its_bucket_left_is_counted():
    def main(world):
        torch.manual_seed(0)
        ddp = ec.DDP(Shared().double(), world.group)  # one bucket, in which "first" comes last
        torch.manual_seed(0)
        plain = Shared().double()
        x = rows(0, 2).requires_grad_()
        plain(x).mean().backward()
        with ddp.no_sync():
            ddp(share(x, world.rank, 2)).mean().backward()
        ddp.sync_gradients()
        assert_close(ddp, plain)

    ec.run(main, 2)


def test_a_sparse_gradient_is_refused_when_it_comes():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(4, 2))

        def forward(self, i):
            return torch.nn.functional.embedding(i, self.table, sparse=True)

    def main(world):
        ec.DDP(Sparse(), world.group)(torch.tensor([1])).sum().backward()

    with pytest.raises(ec.errors.UnsupportedError, match="'table' got a gradient of layout"):
        ec.run(main, 2)


def test_a_gradient_that_is_dropped_during_backward_is_an_error():
    def main(world):
        first, last = nn.Linear(2, 2), nn.Linear(2, 1)
        drop = lambda grad: setattr(last.bias, "grad", None)  # noqa: E731
        first.register_forward_hook(lambda module, args, out: out.register_hook(drop) and None)
        ec.DDP(nn.Sequential(first, last), world.group)(torch.ones(1, 2)).sum().backward()

    with pytest.raises(ec.StateError, match=r"'1\.bias' was set to None during backward"):
        ec.run(main, 2)


def test_sync_gradients_at_the_wrong_time_says_when_to_call_it():
    def main(world):
        ddp = ec.DDP(nn.Linear(6, 1).double(), world.group)
        x = rows(0, 1)
        with pytest.raises(ec.StateError, match=r"inside no_sync\(\)"), ddp.no_sync():
            ddp.sync_gradients()
        ddp(x).sum().backward()
        with pytest.raises(ec.StateError, match="no local gradients"):
            ddp.sync_gradients()
        out = ddp(x)
        out.register_hook(lambda grad: ddp.sync_gradients())
        with pytest.raises(ec.StateError, match="inside backward"):
            out.sum().backward()
        ddp.zero_grad()
        ddp(x).sum().backward()

    ec.run(main, 2)


def test_sync_gradients_after_no_sync_reduces_what_was_left():
    def main(world):
        plain, ddp = mlp(), ec.DDP(mlp(), world.group, **SMALL)
        x = rows(0, 2)
        plain(x).pow(2).mean().backward()
        with ddp.no_sync():
            ddp(share(x, world.rank, 2)).pow(2).mean().backward()
        ddp.sync_gradients()
        assert_close(ddp, plain)

    ec.run(main, 2)


def test_parameters_without_elements_are_reduced_like_others():
    def main(world):
        model = nn.Module()
        model.empty = nn.Parameter(torch.zeros(0, 3))
        model.full = nn.Parameter(torch.ones(2))
        model.forward = lambda x: (x * model.full).sum() + model.empty.sum()
        ddp = ec.DDP(model, world.group, bucket_bytes=0)
        ddp(float(world.rank)).backward()
        assert ddp.empty.grad.shape == (0, 3)
        return ddp.full.grad.tolist()

    assert ec.run(main, 3) == [[1.0, 1.0]] * 3


def test_memory_of_buckets_is_told_and_returned():
    def main(world):
        ddp = ec.DDP(mlp(torch.float32), world.group, gradient_dtype=torch.bfloat16)
        for _ in range(2):
            ddp(rows(0, 1, dtype=torch.float32)).sum().backward()
        at_work, wire = dict(held), sum(bucket.nbytes for bucket in ddp.buckets)
        ddp.unwrap()
        return at_work, wire, dict(held)

    held = {}

    def listener(event):
        if event.name == "memory":
            category = event.facts["category"]
            held[category] = held.get(category, 0) + event.facts["nbytes"]

    with ec.events.listen(listener):
        ((at_work, wire, afterwards),) = ec.run(main, 1)
    numel = sum(param.numel() for param in mlp().parameters())
    assert 4 * numel <= at_work["gradients"] < 4 * (numel + 5 * 16)  # five gradients, aligned
    assert at_work["communication"] == wire
    assert afterwards == {"gradients": 0, "communication": 0}


def test_a_model_and_its_wrapper_are_collected_together():
    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        ddp(rows(0, 1)).sum().backward()
        reference = weakref.ref(ddp)
        del ddp
        gc.collect()
        return reference() is None

    assert ec.run(main, 1) == [True]
