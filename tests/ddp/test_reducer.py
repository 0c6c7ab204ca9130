"""Every way in which a backward may run: views, order, accumulation, odd graphs, failures."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.ddp.checks import SMALL
from tests.ddp.models import assert_close, gradients, mlp, rows, share


def test_100_overlapped_repeats_with_unequal_buckets_equal_the_manual_mode_bitwise():
    def main(world):
        sizes = {"bucket_bytes": 600, "first_bucket_bytes": 50}
        overlapped = ec.DDP(mlp(torch.float32), world.group, **sizes)
        manual = ec.DDP(mlp(torch.float32), world.group, sync="manual", **sizes)
        assert len({bucket.nbytes for bucket in overlapped.buckets}) > 2
        for step in range(100):
            x = share(rows(step, 3, dtype=torch.float32), world.rank, 3)
            for model in (overlapped, manual):
                model.zero_grad()
                model(x).pow(2).sum().backward()
            manual.sync_gradients()
            for a, b in zip(overlapped.parameters(), manual.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)

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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_two_backwards_of_one_graph_add_up(reduction):
    def main(world):
        ddp = ec.DDP(mlp(), world.group, reduction=reduction, **SMALL)
        x = share(rows(0, 2), world.rank, 2)
        ddp(x).sum().backward()
        once = gradients(ddp)
        ddp.zero_grad()
        loss = ddp(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        for name, grad in gradients(ddp).items():
            torch.testing.assert_close(grad, 2 * once[name])

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


@dataclass
class Output:
    """What a model returns that pytree does not know."""

    logits: Tensor


class Opaque:
    """What nobody can look into: the tensor is in a closure."""

    def __init__(self, logits: Tensor) -> None:
        self.show = lambda: logits

    @property
    def logits(self) -> Tensor:
        return self.show()


class Wrapping(nn.Module):
    """Returns the output of ``inner`` in another form."""

    def __init__(self, inner: nn.Module, form: type) -> None:
        super().__init__()
        self.inner = inner
        self.form = form

    def forward(self, x: Tensor) -> Output | Opaque:
        return self.form(self.inner(x))


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


def test_a_sum_onto_reduced_gradients_that_nothing_announced_is_refused():
    def main(world):
        ddp = ec.DDP(Wrapping(mlp(), Opaque), world.group, reduction="sum")
        ddp(rows(0, 1)).logits.sum().backward()
        ddp(rows(0, 1)).logits.sum().backward()

    with pytest.raises(ec.StateError, match="no output of forward announced"):
        ec.run(main, 2)


def test_the_dataclass_output_announces_backward_so_a_sum_may_accumulate():
    def main(world):
        ddp = ec.DDP(Wrapping(mlp(), Output), world.group, reduction="sum")
        ddp(rows(0, 1)).logits.sum().backward()
        first = gradients(ddp)
        ddp(rows(0, 1)).logits.sum().backward()
        for name, grad in gradients(ddp).items():
            torch.testing.assert_close(grad, 2 * first[name])

    ec.run(main, 2)


@pytest.mark.parametrize("reduction", ["mean", "sum", 7])
def test_no_sync_on_top_of_reduced_gradients_keeps_them(reduction):
    def main(world):
        ddp = ec.DDP(mlp(), world.group, reduction=reduction, **SMALL)
        expected = {}
        xs = [share(rows(step, 3), world.rank, 3) for step in range(4)]
        for x in xs:
            ddp.zero_grad()
            ddp(x).pow(2).sum().backward()
            for name, grad in gradients(ddp).items():
                expected[name] = expected[name] + grad if name in expected else grad
        ddp.zero_grad()
        ddp(xs[0]).pow(2).sum().backward()
        with ddp.no_sync():
            ddp(xs[1]).pow(2).sum().backward()
            ddp(xs[2]).pow(2).sum().backward()
        ddp(xs[3]).pow(2).sum().backward()
        for name, grad in gradients(ddp).items():
            torch.testing.assert_close(grad, expected[name])

    ec.run(main, 3)


def test_a_gradient_that_the_user_replaced_counts_as_local():
    def main(world):
        ddp = ec.DDP(nn.Linear(1, 1), world.group)
        for param in ddp.parameters():
            param.grad = torch.full_like(param, float(world.rank))
        ddp.sync_gradients()
        return [param.grad.item() for param in ddp.parameters()]

    assert ec.run(main, 4) == [[1.5, 1.5]] * 4
