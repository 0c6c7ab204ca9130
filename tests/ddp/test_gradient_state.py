"""What ``.grad`` holds, reduced or local, and how one is added to the other."""

import pytest
import torch
from torch import nn

import echelon as ec
from tests.ddp.checks import SMALL
from tests.ddp.models import Opaque, Output, Wrapping, assert_close, gradients, mlp, rows, share


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


def test_a_sum_may_accumulate_onto_reduced_gradients_only_if_the_output_announces_backward():
    def main(world, form):
        ddp = ec.DDP(Wrapping(mlp(), form), world.group, reduction="sum")
        ddp(rows(0, 1)).logits.sum().backward()
        first = gradients(ddp)
        ddp(rows(0, 1)).logits.sum().backward()
        for name, grad in gradients(ddp).items():
            torch.testing.assert_close(grad, 2 * first[name])

    ec.run(main, 2, args=(Output,))
    with pytest.raises(ec.StateError, match="no output of forward announced"):
        ec.run(main, 2, args=(Opaque,))


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
