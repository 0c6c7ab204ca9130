"""No option is inert: each test here fails when the option it names is ignored."""

import pytest
import torch
from torch import nn

import echelon as ec
from tests.ddp.models import gradients, mlp, rows, share


def wrapped(options, ranks=2, steps=1, build=mlp):
    """What two ranks have after ``steps`` of DDP with ``options``: (wrapper, gradients) by rank."""

    def main(world):
        ddp = ec.DDP(build(seed=world.rank), world.group, **options)
        weights = [param.detach().clone() for param in ddp.parameters()]
        for step in range(steps):
            ddp.zero_grad()
            ddp(share(rows(step, ranks), world.rank, ranks)).pow(2).sum().backward()
        return ddp.buckets, weights, gradients(ddp)

    return ec.run(main, ranks)


def test_bucket_bytes_cuts_buckets():
    counts = []
    for size in (2**20, 0):
        buckets, _, _ = wrapped({"bucket_bytes": size, "first_bucket_bytes": 0})[0]
        counts.append(len(buckets))
    assert counts == [2, 5]


def test_first_bucket_bytes_cuts_the_first_bucket():
    counts = []
    for size in (0, 2**20):
        buckets, _, _ = wrapped({"bucket_bytes": 2**20, "first_bucket_bytes": size})[0]
        counts.append(len(buckets[0].names))
    assert counts == [1, 5]


def test_sync_manual_leaves_gradients_local():
    a, b = (grads for _, _, grads in wrapped({"sync": "manual", "init": "broadcast"}))
    assert not torch.equal(a["0.weight"], b["0.weight"])
    a, b = (grads for _, _, grads in wrapped({"sync": "overlap"}))
    assert torch.equal(a["0.weight"], b["0.weight"])


def test_init_broadcast_makes_weights_equal_and_trust_leaves_them():
    (_, a, _), (_, b, _) = wrapped({"init": "broadcast"})
    assert torch.equal(a[0], b[0])
    (_, a, _), (_, b, _) = wrapped({"init": "trust"})
    assert not torch.equal(a[0], b[0])


def test_init_verify_refuses_different_weights():
    with pytest.raises(ec.ModelMismatch, match=r"the values of parameter '0\.weight'"):
        wrapped({"init": "verify"})


def test_gradient_dtype_sets_what_travels():
    (buckets, _, grads), _ = wrapped({"gradient_dtype": torch.bfloat16})
    assert {bucket.dtype for bucket in buckets} == {torch.bfloat16}
    assert all(grad.dtype is torch.float64 for grad in grads.values())
    assert torch.equal(grads["0.weight"], grads["0.weight"].bfloat16().double())


def test_reduction_scales_the_sum():
    mean, total, fifth = (
        wrapped({"reduction": reduction})[0][2]["4.weight"] for reduction in ("mean", "sum", 5)
    )
    torch.testing.assert_close(total, 2 * mean)
    torch.testing.assert_close(fifth, total / 5)


@pytest.mark.parametrize(("broadcast_buffers", "equal"), [(True, True), (False, False)])
def test_broadcast_buffers_decides_whether_statistics_agree(broadcast_buffers, equal):
    def main(world):
        ddp = ec.DDP(nn.BatchNorm1d(6), world.group, broadcast_buffers=broadcast_buffers)
        x = share(rows(0, 2, dtype=torch.float32), world.rank, 2)
        ddp(x).sum().backward()
        before = []
        ddp.module.register_forward_pre_hook(lambda m, _: before.append(m.running_mean.clone()))
        ddp(x)
        return before[0]

    a, b = ec.run(main, 2)
    assert torch.equal(a, b) is equal


def test_ignored_leaves_a_gradient_local_and_the_weight_to_others():
    def main(world):
        net = mlp(seed=world.rank)
        ddp = ec.DDP(net, world.group, ignored=[net[0].weight])
        ddp(share(rows(0, 2), world.rank, 2)).pow(2).sum().backward()
        names = [name for bucket in ddp.buckets for name in bucket.names]
        return names, net[0].weight.detach().clone(), gradients(ddp)

    (names, a, mine), (_, b, theirs) = ec.run(main, 2)
    assert "0.weight" not in names
    assert torch.equal(a, b)  # sent at the start like all others
    assert not torch.equal(mine["0.weight"], theirs["0.weight"])
    assert torch.equal(mine["2.weight"], theirs["2.weight"])
