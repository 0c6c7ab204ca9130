"""Derivatives of derivatives, ``torch.func`` and copies, over DDP, Pipeline and FSDP."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon.errors import StateError, UnsupportedError
from tests import reference
from tests.worlds import KINDS, run_world

OPTIONS = (
    {},
    {"bucket_bytes": 60, "first_bucket_bytes": 30},
    {"sync": "manual"},
    {"reduction": 2.0},
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def rows(rank: int) -> Tensor:
    return reference.rows(rank, 4, 3)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Of the gradient with respect to the input, alone."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def critic(model: nn.Module, x: Tensor) -> Tensor:
    """A loss with such a penalty."""
    return model(x).mean() + 10 * penalty(model, x)


def score_matching(model: nn.Module, x: Tensor) -> Tensor:
    """The divergence of the score, which takes three derivatives."""
    x = x.clone().requires_grad_()
    (score,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (divergence,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return (divergence.sum(dim=1) + score.pow(2).sum(dim=1) / 2).mean()


def norm_of_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """Of the gradient with respect to the parameters."""
    grads = torch.autograd.grad(model(x).pow(2).mean(), list(model.parameters()), create_graph=True)
    return sum(one.pow(2).sum() for one in grads)


LOSSES = (penalty, critic, score_matching, norm_of_gradient)
Loss = Callable[[nn.Module, Tensor], Tensor]


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_inside_of_a_transform_is_refused_on_every_rank(kind):
    run_world(kind, pipelines_refuse, 2)


def tangent(model: nn.Module, x: Tensor) -> None:
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, torch.ones_like(x)))


def pipelines_refuse_tangents(world: ec.World) -> None:
    with pytest.raises(ec.ArgumentError, match="forward-mode"):
        tangent(pipeline(world), rows(0))


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


# FSDP -----------------------------------------------------------------------------------------


def sharded(world: ec.World, **options: Any) -> ec.FSDP:
    units = ec.units.by_type(nn.Linear)
    return ec.FSDP(net(), world.group, units=units, min_num_params=0, **options)


def of_parameters(model: nn.Module, x: Tensor) -> None:
    values = {name: param.detach() for name, param in net().named_parameters()}
    grad(lambda own: functional_call(model, own, (x,)).sum())(values)


GRAPHS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "gradient penalty": penalty,
    "backward": lambda model, x: model(x).square().mean().backward(create_graph=True),
}
TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: grad(lambda one: model(one).sum())(x),
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),)),
    "vmap": lambda model, x: vmap(model)(x),
    "jacrev": lambda model, x: jacrev(model)(x[0]),
    "forward mode": tangent,
    "functional_call in grad": of_parameters,
}


def refused(world: ec.World) -> None:
    plain = net()
    plain(torch.cat([rows(0), rows(1)])).square().mean().backward()
    for strategy in (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP, ec.Strategy.NO_SHARD):
        model = sharded(world, strategy=strategy)
        for take in GRAPHS.values():
            with pytest.raises(UnsupportedError, match=r"create_graph=True over FSDP.*ec\.DDP"):
                take(model, rows(world.rank))
        for turn in range(world.size):  # torch has one forward mode for all threads
            for take in TRANSFORMS.values() if turn == world.rank else ():
                with pytest.raises(UnsupportedError, match=r"inside of torch\.func"):
                    take(model, rows(world.rank))
            world.group.barrier()
        # Nothing is left of what was refused.
        model.zero_grad()
        model(rows(world.rank)).square().mean().backward()
        for found, expected in zip(model.unwrap().parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # it is refused
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's forward mode
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_derivatives_and_transforms_are_refused_over_fsdp(kind: str) -> None:
    run_world(kind, refused, 2)


def inputs_and_checkpoints(world: ec.World) -> None:
    plain = net()
    x = rows(world.rank).requires_grad_()
    wanted = torch.autograd.grad(plain(x).sum(), x)[0]
    model = sharded(world)
    found = torch.autograd.grad(model(x).sum(), x)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
    for reentrant in (False, True):  # which runs forward in backward, with gradients enabled
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_first_derivatives_are_taken_as_ever(kind: str) -> None:
    run_world(kind, inputs_and_checkpoints, 2)


def test_functional_call_with_other_tensors_is_refused_where_it_trains() -> None:
    def main(world: ec.World) -> None:
        model = ec.FSDP(net(), world.group, min_num_params=0)
        values = {name: param.clone() for name, param in net().named_parameters()}
        with pytest.raises(StateError, match=r"functional_call does.*before it is sharded"):
            functional_call(model, values, (rows(0),))

    ec.run(main, 2)
