"""Numbers of one gradient of a stage are those of the model, and no rank sums or compares them."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from echelon.errors import UnsupportedError
from echelon.modules.memory_writes import tensors_in
from echelon.modules.sharded_norms import mark_stage_gradients
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


def gradients(*values: Tensor) -> list[Any]:
    """Gradients of stages with these values, each of a parameter of its own."""
    params = [nn.Parameter(value) for value in values]
    for param in params:
        param.grad = param.detach().clone()
    mark_stage_gradients(params)
    return [param.grad for param in params]


# Some are written in Python in torch, which calls ``__torch_function__`` another way.
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mse_loss": F.mse_loss,
    "einsum": lambda g, o: torch.einsum("ij,ij->", o, g),
    "tensordot": lambda g, o: torch.tensordot(o, g),
    "block_diag": lambda g, o: torch.block_diag(o, g),
    "broadcast_tensors": lambda g, o: torch.broadcast_tensors(o, g),
    "power of a gradient": lambda g, o: g**o,
    "power of a tensor": lambda g, o: o**g,
    "quotient": lambda g, o: o // g,
    "power of a tensor by a number": lambda g, o: o ** g.max(),
    "quotient by a number": lambda g, o: o // g.max(),
    "keywords in any order": lambda g, o: torch.mul(other=o, input=g),
    "norm of a keyword": lambda g, o: torch.linalg.vector_norm(ord=2, x=g) * o,
    "sorted rows": lambda g, o: g.sort(dim=0),
    "in place": lambda g, o: o.clone().add_(g),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_gradient_of_a_stage_is_taken_by_functions_of_torch(call: str) -> None:
    value, other = torch.arange(1.0, 5).view(2, 2), torch.tensor([[2.0, 3], [1, 2]])
    (gradient,) = gradients(value)
    found, expected = CALLS[call](gradient, other), CALLS[call](value, other)
    whole = [ec.local_shard(tensor) for tensor in tensors_in(found)]
    torch.testing.assert_close(whole, list(tensors_in(expected)))
    assert type(other) is Tensor


# Of gradients of one shape.
TOTALS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sum by element": lambda a, b: (a.square() + b.square()).sum().sqrt(),
    "a sum in place": lambda a, b: torch.zeros(2, 2).add_(a.square()).add_(b.square()).sum(),
    "magnitudes by element": lambda a, b: a.abs().maximum(b.abs()).max(),
    "sums of columns": lambda a, b: a.square().sum(0).sum() + b.square().sum(0).sum(),
    "pieces": lambda a, b: sum(piece.sum() for grad in (a, b) for piece in grad.chunk(2)),
    "pieces in a vector": lambda a, b: torch.cat([*a.chunk(2), *b.chunk(2)]).norm(),
    "scaled lists": lambda a, b: sum(g.norm() ** 2 for g in torch._foreach_mul([a, b], 0.5)),
    "norms of a list of sums": lambda a, b: torch._foreach_norm([a.square() + b.square()])[0],
    "slices of a vector": lambda a, b: filled(a, b).norm(),
    "elements of a vector": lambda a, b: filled(a.norm(), b.norm()).sum(),
}


def filled(a: Tensor, b: Tensor) -> Tensor:
    vector = torch.zeros(8)
    vector[:4], vector[4:] = a.flatten(), b.flatten()
    return vector


@pytest.mark.parametrize("how", TOTALS)
def test_a_number_of_what_was_computed_from_two_gradients_is_refused(how: str) -> None:
    value = torch.arange(1.0, 5).view(2, 2)
    TOTALS[how](value, value)  # of plain tensors
    with pytest.raises(UnsupportedError, match=r"ec\.clip_grad_norm_\(model, max_norm\)"):
        TOTALS[how](*gradients(value, value))


def test_a_function_of_two_lists_of_gradients_keeps_each_apart() -> None:
    values = [torch.arange(1.0, 5), torch.ones(3)]
    grads = gradients(*values)
    for scaled, value in zip(torch._foreach_mul(grads, 2), values, strict=True):
        assert scaled.norm().item() == value.norm().item() * 2
    running = [torch.zeros(4), torch.zeros(3)]
    torch._foreach_add_(running, grads)
    torch._foreach_mul_(grads, grads[1].norm())
    assert grads[0].max().item() == pytest.approx(4 * 3**0.5)


def test_a_tensor_that_a_gradient_only_says_something_of_stays_plain() -> None:
    (gradient,) = gradients(torch.ones(2, 2))
    batch, flat = torch.ones(3), torch.zeros(8)
    assert type(batch.to(gradient)) is Tensor
    assert type(batch * gradient.norm()) is Tensor
    assert type(batch.mul_(gradient.norm())) is Tensor
    param = nn.Parameter(torch.ones(2, 2))
    param.grad = flat[:4].view(2, 2)
    mark_stage_gradients([param])
    assert type(param.grad._base) is Tensor
