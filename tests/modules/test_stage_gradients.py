"""Numbers of one gradient of a stage are those of the model, and no rank sums or compares them."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon as ec
from echelon.errors import UnsupportedError
from tests.modules.test_sharded_norms import CLOSE, build, rows, staged

# What scripts make of all gradients, one number after the other.
SUMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "squares": lambda grads: sum(g.pow(2).sum() for g in grads) ** 0.5,
    "added in place": lambda grads: torch.zeros(()).add_(grads[0].norm()) + grads[1].norm() ** 2,
    "magnitudes": lambda grads: max(g.abs().max() for g in grads),
    "squares of a vector": lambda grads: torch.cat([g.flatten() for g in grads]).pow(2).sum(),
    "means in a vector": lambda grads: torch.stack([g.abs().mean() for g in grads]).mean(),
    "norms in a vector": lambda grads: torch.stack([g.norm() for g in grads]).square().sum(),
    "norms of a list": lambda grads: torch.stack(torch._foreach_norm(grads)).sum(),
    "dots": lambda grads: sum(torch.dot(g.flatten(), g.flatten()) for g in grads),
}


def check_sums_of_stages(world: ec.World, text: str) -> None:
    model = staged(world, text)
    named = dict(model.named_parameters())
    expected = build()
    expected(rows(0)).square().mean().backward()
    for name, param in expected.named_parameters():
        if name not in named:
            continue
        grad, whole = named[name].grad, param.grad
        for number in (
            lambda g: g.norm(),
            lambda g: g.pow(2).sum() / g.abs().mean(),
            lambda g: g.std() * 2 - g.min(),
            lambda g: (0.1 / (g.norm() + 1e-6)).clamp(max=1.0),
        ):
            torch.testing.assert_close(ec.local_shard(number(grad)), number(whole), **CLOSE)
            torch.testing.assert_close(number(grad).item(), number(whole).item(), **CLOSE)
        average = 0.9 * grad.norm() + 0.1 * grad.abs().mean()  # of one gradient, over steps
        average.mul_(0.5).add_(grad.norm().item(), alpha=0.5)
        assert average > grad.min()
        logged = pickle.loads(pickle.dumps({"norm": grad.norm().item(), "sum": grad.sum()}))
        assert [type(value) for value in logged.values()] == [float, Tensor]
        assert json.dumps(round(grad.norm().item(), 3)) == json.dumps(round(whole.norm().item(), 3))
    grads, others = ([p.grad for p in one.parameters()] for one in (model, staged(world, text)))
    for grad, other in zip(grads, others, strict=True):  # of two models
        assert ((grad - other).abs().max() / other.abs().max()).item() == 0
        assert (
            torch.dot(grad.flatten(), other.flatten()) / grad.norm() / other.norm()
        ).item() > 0.9
    for how, total in SUMS.items():
        with pytest.raises(UnsupportedError, match=r"ec\.clip_grad_norm_\(model, max_norm\)"):
            pytest.fail(f"{how}: {total(grads)}")


@pytest.mark.parametrize("text", ["pp=2", "pp=2,dp=2", "pp=2,shard=2"])
def test_a_sum_over_the_gradients_of_stages_is_refused_and_numbers_of_one_are_right(
    text: str,
) -> None:
    ec.run(check_sums_of_stages, ec.Plan.parse(text, microbatches=2).num_ranks, args=(text,))
