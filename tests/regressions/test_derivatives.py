"""Derivatives of derivatives, ``torch.func`` and copies, over DDP and Pipeline."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import echelon as ec
from tests.worlds import run_world

OPTIONS = (
    {},
    {"bucket_bytes": 60, "first_bucket_bytes": 30},
    {"sync": "manual"},
    {"reduction": 2.0},
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def rows(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of the gradient with respect to the input, alone."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def critic(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss with such a penalty."""
    return model(x).mean() + 10 * penalty(model, x)


def score_matching(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The divergence of the score, which takes three derivatives."""
    x = x.clone().requires_grad_()
    (score,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (divergence,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return (divergence.sum(dim=1) + score.pow(2).sum(dim=1) / 2).mean()


def norm_of_gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of the gradient with respect to the parameters."""
    grads = torch.autograd.grad(model(x).pow(2).mean(), list(model.parameters()), create_graph=True)
    return sum(one.pow(2).sum() for one in grads)


LOSSES = (penalty, critic, score_matching, norm_of_gradient)
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def trains_as_one_process(world: ec.World, loss: Loss, options: dict[str, object]) -> None:
    model = ec.DDP(net(), world.group, **options)
    plain = net()
    share = options.get("reduction", world.size)
    for step in range(4):
        loss(model, rows(world.rank)).backward()
        if options.get("sync") == "manual":
            model.sync_gradients()
        (sum(loss(plain, rows(r)) for r in range(world.size)) / share).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:  # sums over ranks are taken in another order
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
        if step % 2:  # and so also on top of reduced gradients
            model.zero_grad()
            plain.zero_grad()


def all_train_as_one_process(world: ec.World) -> None:
    for loss in LOSSES:
        for options in OPTIONS:
            trains_as_one_process(world, loss, options)


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_losses_with_derivatives_of_derivatives_train_as_in_one_process(kind):
    run_world(kind, all_train_as_one_process, 2)


DERIVATIVES = (
    lambda model, x: grad(lambda z: model(z).sum())(x),
    lambda model, x: jacrev(model)(x),
    lambda model, x: vmap(model)(x),
    lambda model, x: vmap(grad(lambda z: model(z[None]).sum()))(x),
)


def functional_derivatives_are_local(world: ec.World) -> None:
    for options in OPTIONS:
        model, plain, x = ec.DDP(net(), world.group, **options), net(), rows(world.rank)
        model(x).sum().backward()
        if options.get("sync") == "manual":
            model.sync_gradients()
        before = [p.grad.clone() for p in model.parameters()]
        for derive in DERIVATIVES:
            assert torch.equal(derive(model, x), derive(plain, x))
        for old, param in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, param.grad)


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_functional_derivatives_are_those_of_the_rank_and_leave_gradients_alone(kind):
    run_world(kind, functional_derivatives_are_local, 2)


def forward_mode_is_local(world: ec.World) -> None:
    model, x = ec.DDP(net(), world.group), rows(world.rank)
    for found, expected in zip(
        jvp(model, (x,), (torch.ones_like(x),)),
        jvp(net(), (x,), (torch.ones_like(x),)),
        strict=True,
    ):
        assert torch.equal(found, expected)
    model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


# torch has one level of forward-mode differentiation for a whole process, so simulated ranks that
# use it at the same time meet in it.
@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_forward_mode_is_that_of_the_rank(kind):
    run_world(kind, forward_mode_is_local, 2)


def trains_through_vmap(world: ec.World) -> None:
    model, plain = ec.DDP(net(), world.group), net()
    vmap(model)(rows(world.rank)).sum().backward()
    sum(plain(rows(r)).sum() / world.size for r in range(world.size)).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_a_backward_through_vmap_reduces():
    run_world("threads", trains_through_vmap, 2)


def exchanges_parameters(world: ec.World) -> None:
    model, x = ec.DDP(net(), world.group), rows(world.rank)
    params = dict(model.named_parameters())
    others = {name: param.detach().clone().requires_grad_() for name, param in params.items()}
    for call in (
        lambda: functional_call(model, others, (x,)),
        lambda: grad(lambda p: functional_call(model, p, (x,)).sum())(params),
    ):
        with pytest.raises(ec.StateError, match=r"'0.weight' was exchanged .* \(model.module\)"):
            call()
    grad(lambda p: functional_call(model.module, p, (x,)).sum())(params)
    averaged = {name: param.detach() * 2 for name, param in params.items()}
    assert torch.equal(
        functional_call(model, averaged, (x,)), functional_call(net(), averaged, (x,))
    )
    model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_parameters_that_functional_call_exchanges_are_refused_if_they_are_trained():
    run_world("threads", exchanges_parameters, 2)


def makes_a_graph(world: ec.World) -> None:
    model = ec.DDP(net(), world.group)
    with pytest.raises(ec.StateError, match=r"create_graph=True\) cannot be reduced"):
        model(rows(0)).sum().backward(create_graph=True)
    assert all(param.grad is None for param in model.parameters())
    model(rows(0)).sum().backward()
    model.zero_grad()
    manual = ec.DDP(net(), world.group, sync="manual")
    for other in (manual, model):
        with other.no_sync():
            other(rows(0)).sum().backward(create_graph=True)
        assert any(param.grad.requires_grad for param in other.parameters())
        with pytest.raises(ec.StateError, match=r"create_graph=True\) cannot be reduced"):
            other.sync_gradients()
        other.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_that_makes_a_graph_is_refused_before_a_gradient_is_made():
    run_world("threads", makes_a_graph, 2)


def pipeline(world: ec.World) -> ec.Pipeline:
    stages = ec.pipeline.split(net(), world.size)
    return ec.Pipeline(stages, world.group, microbatches=2, loss_fn=nn.functional.mse_loss)


def pipelines_refuse(world: ec.World) -> None:
    pipe, x = pipeline(world), rows(0)
    y = torch.zeros(4, 1, dtype=torch.float64)
    with pytest.raises(ec.ArgumentError, match=r"a pipeline inside of torch\.func"):
        grad(lambda z: pipe.step(z, target=y, loss_everywhere=True))(x)
    with pytest.raises(ec.ArgumentError, match=r"a pipeline inside of torch\.func"):
        vmap(pipe)(x)
    assert pipe.step(x, target=y, loss_everywhere=True) is not None


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_a_pipeline_inside_of_a_transform_is_refused_on_every_rank(kind):
    run_world(kind, pipelines_refuse, 2)


def pipelines_refuse_tangents(world: ec.World) -> None:
    pipe, x = pipeline(world), rows(0)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(ec.ArgumentError, match="forward-mode"),
    ):
        pipe(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_a_pipeline_refuses_a_tangent(kind):
    run_world(kind, pipelines_refuse_tangents, 2)


def copies(world: ec.World) -> None:
    pipe, replica = pipeline(world), ec.DDP(net(), world.group)
    with pytest.raises(ec.StateError, match="copy the stages before"):
        copy.deepcopy(pipe)
    assert torch.equal(copy.deepcopy(replica).module[0].weight, replica.module[0].weight)
    for model in (pipe, replica):
        with pytest.raises(ec.StateError, match="cannot be pickled, saved or sent"):
            pickle.dumps(model)
        with pytest.raises(ec.StateError, match="cannot be pickled, saved or sent"):
            torch.save(model, io.BytesIO())


def test_what_cannot_be_copied_or_pickled_says_what_to_do():
    run_world("threads", copies, 2)
