"""Every way in which a backward may run: views, order, odd graphs, and failures."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import echelon as ec
from echelon.comm import streams
from echelon.ddp.reducer import Reducer
from tests.ddp.checks import SMALL, train_overlapped_beside_manual
from tests.ddp.models import Opaque, Output, Wrapping, assert_close, mlp, rows, share
from tests.modules.test_parameters import ReadingWaits


@pytest.mark.slow
def test_100_overlapped_repeats_with_unequal_buckets_equal_the_manual_mode_bitwise():
    def main(world):
        sizes = {"bucket_bytes": 600, "first_bucket_bytes": 50}
        overlapped = train_overlapped_beside_manual(world, 100, sizes)
        assert len({bucket.nbytes for bucket in overlapped.buckets}) > 2

    ec.run(main, 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_views_of_the_bucket_and_stay_so(ranks):
    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        x = share(rows(0, ranks), world.rank, ranks)
        pointers = []
        for i in range(4):
            ddp.zero_grad(set_to_none=i % 2 == 0)
            ddp(x).sum().backward()
            pointers.append([param.grad.data_ptr() for param in ddp.parameters()])
            storages = {param.grad.untyped_storage().data_ptr() for param in ddp.parameters()}
            assert len(storages) == len(ddp.buckets)
        assert pointers[1] == pointers[2] == pointers[3]

    ec.run(main, ranks)


def test_gradients_of_channels_last_weights_have_their_strides():
    def main(world):
        model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        ddp = ec.DDP(model, world.group)
        ddp(torch.randn(1, 3, 4, 4)).sum().backward()
        assert ddp.weight.grad.stride() == ddp.weight.stride()
        return ddp.weight.grad.clone()

    a, b = ec.run(main, 2)
    assert torch.equal(a, b)


class Reversed(nn.Module):
    """Registers its layers in the order opposite to their use."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3, 3, bias=False)
        self.unused = nn.Linear(3, 3, bias=False)
        self.first = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_buckets_are_made_anew_once_in_the_order_of_arrival():
    def main(world):
        ddp = ec.DDP(Reversed(), world.group, bucket_bytes=0, first_bucket_bytes=0)
        orders = []
        for _ in range(3):
            ddp(torch.ones(1, 3)).sum().backward()
            orders.append([bucket.names[0].removesuffix(".weight") for bucket in ddp.buckets])
        return orders

    for orders in ec.run(main, 2):
        assert orders == [
            ["first", "unused", "second"],
            ["second", "first", "unused"],
            ["second", "first", "unused"],
        ]


def test_the_gradients_of_two_forwards_and_one_backward_are_their_sum():
    def main(world):
        plain, ddp = mlp(), ec.DDP(mlp(), world.group, **SMALL)
        for step in range(3):
            a, b = rows(step, 2), rows(step + 50, 2)
            for model, x, y in (
                (plain, a, b),
                (ddp, a.chunk(2)[world.rank], b.chunk(2)[world.rank]),
            ):
                model.zero_grad()
                (model(x).pow(2).mean() + model(y).sin().mean()).backward()
            assert_close(ddp, plain)

    ec.run(main, 2)


def test_a_gradient_penalty_trains_as_in_one_process():
    def loss(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.pow(2).mean() + model(x).pow(2).mean()

    def main(world):
        plain, ddp = mlp(), ec.DDP(mlp(), world.group, **SMALL)
        for step in range(3):
            x = rows(step, 2)
            plain.zero_grad()
            ddp.zero_grad()
            loss(plain, x).backward()
            loss(ddp, share(x, world.rank, 2)).backward()
            assert_close(ddp, plain)

    ec.run(main, 2)


def test_autograd_grad_under_no_sync_does_not_communicate():
    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        with ddp.no_sync():
            if world.rank == 0:  # the other rank does nothing, so communication would deadlock
                grads = torch.autograd.grad(ddp(rows(0, 1)).sum(), list(ddp.parameters()))
                assert all(grad.isfinite().all() for grad in grads)
        ddp(rows(0, 1)).sum().backward()

    ec.run(main, 2)


@pytest.mark.parametrize("of", ["input", "parameters"])
def test_a_rank_alone_may_take_a_gradient_that_no_parameter_accumulates(of):
    def main(world):
        plain, ddp = mlp(), ec.DDP(mlp(), world.group, **SMALL)
        for step in range(2):
            x = rows(step, 2)
            plain.zero_grad()
            ddp.zero_grad()
            plain(x).pow(2).mean().backward()
            mine = share(x, world.rank, 2).clone().requires_grad_()
            if world.rank == 0:  # the other rank does nothing, so a reduction would be its next
                inputs = mine if of == "input" else list(ddp.parameters())
                assert all(g.isfinite().all() for g in torch.autograd.grad(ddp(mine).sum(), inputs))
            ddp(mine).pow(2).mean().backward()
            assert_close(ddp, plain)

    ec.run(main, 2)


@pytest.mark.parametrize("form", [Output, Opaque])
def test_the_output_may_hide_in_an_object(form):
    def main(world):
        plain, ddp = mlp(), ec.DDP(Wrapping(mlp(), form), world.group, **SMALL)
        for step in range(4):
            x = rows(step, 2)
            if step != 2:  # one step accumulates on a reduced gradient
                plain.zero_grad()
                ddp.zero_grad()
            plain(x).pow(2).mean().backward()
            ddp(share(x, world.rank, 2)).logits.pow(2).mean().backward()
            assert_close(ddp.inner, plain)

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


def test_a_parameter_that_a_rank_froze_is_told_one_step_late_where_reading_waits(monkeypatch):
    monkeypatch.setitem(streams.kinds, "cpu", ReadingWaits)

    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        x = share(rows(0, 2), world.rank, 2)
        ddp(x).sum().backward()
        if world.rank == 1:
            next(iter(ddp.parameters())).requires_grad_(False)
        ddp(x).sum().backward()
        loss = torch.tensor([float(world.rank)])
        world.group.all_reduce(loss)  # all ranks are at the same point
        with pytest.raises(ec.errors.ModelMismatch, match="whether they train parameter"):
            ddp(x).sum().backward()
        return loss.item()

    assert ec.run(main, 2) == [1.0, 1.0]


class ReadsOfTheHost(TorchDispatchMode):
    """The values that the host reads of tensors, for each of which it would wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_read_what_a_backward_has_just_reduced(monkeypatch):
    """Whether buffers have changed is read before the next forward, when it is long there."""
    monkeypatch.setitem(streams.kinds, "cpu", ReadingWaits)
    finalize, reads = Reducer._finalize_backward, []

    def watched(self):
        with ReadsOfTheHost() as mode:
            finalize(self)
        reads.append(mode.count)

    monkeypatch.setattr(Reducer, "_finalize_backward", watched)

    def main(world):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        ddp = ec.DDP(model, world.group)
        x = torch.randn(4, 3, dtype=torch.float64)
        means = []
        model[0].register_forward_pre_hook(
            lambda *args: means.append(model[1].running_mean.clone())
        )
        for _ in range(3):
            ddp(x + world.rank).sum().backward()
        return torch.stack(means)

    first, other = ec.run(main, 2)
    assert torch.equal(first, other)  # in the forwards all ranks have the buffers of rank 0
    assert not torch.equal(first[1], first[2])
    assert reads == [0] * 6
