"""Derivatives that FSDP cannot take are refused with what to do, and training goes on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon.errors import StateError, UnsupportedError
from tests.worlds import KINDS, run_world


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def rows(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 3, dtype=torch.float64, generator=generator)


def penalty(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    inner = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    inner.square().sum().backward()


def tangent(model: nn.Module, x: Tensor) -> None:
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, torch.ones_like(x)))


def of_parameters(model: nn.Module, x: Tensor) -> None:
    values = {name: param.detach() for name, param in build().named_parameters()}
    torch.func.grad(lambda own: torch.func.functional_call(model, own, (x,)).sum())(values)


GRAPHS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "gradient penalty": penalty,
    "backward": lambda model, x: model(x).square().mean().backward(create_graph=True),
}
TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda one: model(one).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[0]),
    "forward mode": tangent,
    "functional_call in grad": of_parameters,
}


def refused(world: ec.World) -> None:
    plain = build()
    plain(torch.cat([rows(0), rows(1)])).square().mean().backward()
    for strategy in (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP, ec.Strategy.NO_SHARD):
        model = ec.FSDP(
            build(),
            world.group,
            units=ec.units.by_type(nn.Linear),
            min_num_params=0,
            strategy=strategy,
        )
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


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # it is refused
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's forward mode
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_derivatives_and_transforms_are_refused_over_fsdp(kind: str) -> None:
    run_world(kind, refused, 2)


def inputs_and_checkpoints(world: ec.World) -> None:
    plain = build()
    x = rows(world.rank).requires_grad_()
    wanted = torch.autograd.grad(plain(x).sum(), x)[0]
    units = ec.units.by_type(nn.Linear)
    model = ec.FSDP(build(), world.group, units=units, min_num_params=0)
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
        model = ec.FSDP(build(), world.group, min_num_params=0)
        values = {name: param.clone() for name, param in build().named_parameters()}
        with pytest.raises(StateError, match=r"functional_call does.*before it is sharded"):
            torch.func.functional_call(model, values, (rows(0),))

    ec.run(main, 2)
