"""A unit stays whole until backward has left it, whichever of its parameters get gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from tests.fsdp.checking import same_grads, whole_grads
from tests.reference import assert_states_close, rows, train, train_alone
from tests.worlds import KINDS, events_of, run_world

WIDTH = 6


class Unit(nn.Module):
    """What rules find."""


class FrozenNorm(Unit):
    """LoRA's block: a frozen norm and base, and trainable low-rank factors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.base(h) + h @ self.a.t() @ self.b.t()


class FrozenScale(Unit):
    """The frozen parameter comes first, so its operation is the last of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)


class Detached(Unit):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale.detach()) * self.scale


class InPlace(FrozenScale):
    """Writes into its input, and is written into by whoever called it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.tanh_() * self.scale)


class View(FrozenScale):
    """Takes a view and returns one; both are written into."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(-1, 1, WIDTH)
        return super().forward(y.mul_(0.5)).view(x.shape)


class AllFrozen(Unit):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Checkpointed(FrozenNorm):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class InAnObject(FrozenScale):
    """Takes and returns what torch cannot look into."""

    def forward(self, x: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(inner=SimpleNamespace(x=super().forward(x.inner.x)))


class InAnAttribute(FrozenScale):
    """Returns nothing."""

    def forward(self, x: Tensor) -> None:
        self.result = super().forward(x)


class Stack(nn.Module):
    """Calls its units as they want to be called, the second one twice."""

    def __init__(self, kind: Callable[[], Unit]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for unit in (self.units[0], self.units[1], self.units[1], self.units[2]):
            if isinstance(unit, InAnObject):
                x = unit(SimpleNamespace(inner=SimpleNamespace(x=x))).inner.x
            elif isinstance(unit, InAnAttribute):
                unit(x)
                x = unit.result
            elif isinstance(unit, InPlace | View):
                x = unit((x * 1).view(-1, WIDTH)).mul_(2)
            else:
                x = unit(x)
        return x


UNITS = (
    FrozenNorm,
    FrozenScale,
    Detached,
    InPlace,
    View,
    AllFrozen,
    Checkpointed,
    InAnObject,
    InAnAttribute,
)
CASES: list[tuple[type[Unit], dict[str, Any]]] = [
    *((kind, {}) for kind in UNITS),
    *((kind, {"strategy": ec.Strategy.SHARD_GRAD_OP, "layout": "rows"}) for kind in UNITS),
    (FrozenNorm, {"strategy": ec.Strategy.NO_SHARD}),
    (Detached, {"backward_prefetch": ec.BackwardPrefetch.POST, "forward_prefetch": 2}),
]


def build(kind: Callable[[], Unit]) -> Stack:
    torch.manual_seed(0)
    return Stack(kind).double()


def loss_of(model: nn.Module, rank: int) -> Tensor:
    x = rows(rank, 3, WIDTH)
    return F.mse_loss(model(x), x)


def sharded(world: ec.World, model: nn.Module, **options: Any) -> ec.FSDP:
    return ec.FSDP(model, world.group, units=ec.units.by_type(Unit), min_num_params=0, **options)


def gradients(world: ec.World) -> list[dict[str, Tensor]]:
    """Of two backwards of each case; the second one adds to the first."""
    gradients_of_cases = []
    for kind, options in CASES:
        model = sharded(world, build(kind), **options)
        for _ in range(2):
            loss_of(model, world.rank).backward()
            assert not any(unit.gathered for unit in model.units)
        gradients_of_cases.append(whole_grads(model, world))
    return gradients_of_cases


def of_one_process(model: nn.Module, size: int, num_backwards: int) -> dict[str, Tensor]:
    for rank in range(size):
        (num_backwards * loss_of(model, rank) / size).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_frozen_and_detached_parameters_are_those_of_one_process(kind) -> None:
    for found in run_world(kind, gradients, 2):
        for (unit, _), grads in zip(CASES, found, strict=True):
            same_grads(grads, of_one_process(build(unit), 2, 2))


def checkpointed_by_hand() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Reentrant(), Reentrant()).double()


class TwiceByHand(nn.Module):
    """Calls one unit three times, each time inside of a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unit = nn.Linear(WIDTH, WIDTH), FrozenNorm()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.unit, x, use_reentrant=True)
        return x


def twice_by_hand() -> nn.Module:
    torch.manual_seed(2)
    return TwiceByHand().double()


def nested_backwards(
    world: ec.World, make: Callable[[], nn.Module], num_backwards: int
) -> dict[str, Tensor]:
    model = sharded(world, make())
    for _ in range(num_backwards):
        loss_of(model, world.rank).backward()
    return whole_grads(model, world)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize(("make", "num_backwards"), [(checkpointed_by_hand, 1), (twice_by_hand, 2)])
def test_a_unit_with_a_frozen_norm_may_be_in_one_nested_backward_or_in_several(
    kind: str, make: Callable[[], nn.Module], num_backwards: int
) -> None:
    expected = of_one_process(make(), 2, num_backwards)
    for found in run_world(kind, nested_backwards, 2, (make, num_backwards)):
        same_grads(found, expected)


def peak_of_frozen_units(world: ec.World) -> int:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[AllFrozen() for _ in range(5)])
    wrapped = sharded(world, model)
    for _ in range(2):
        wrapped(torch.randn(2, WIDTH)).sum().backward()
    return wrapped.memory_stats().peak_gathered


def test_frozen_units_are_released_one_by_one() -> None:
    one = (WIDTH * WIDTH + WIDTH) * 4
    # The root, the unit that backward is in, and the one that is gathered ahead of need.
    assert run_world("gloo", peak_of_frozen_units, 2) == [3 * one] * 2


class Aside(Unit):
    """Keeps a part of the loss where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.aside = self.linear(x.detach()).square().sum()
        return x * 2


def loss_aside(world: ec.World) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Aside())
    sharded(world, model)(torch.randn(2, WIDTH))
    model[1].aside.backward()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_backward_that_comes_to_a_unit_by_another_way_than_its_outputs_is_refused(kind) -> None:
    with pytest.raises(ec.StateError, match="by a way that its outputs do not show"):
        run_world(kind, loss_aside, 2)


class UsedByParent(nn.Module):
    """Uses the weight of a module that it never calls, or leaves that to the loss."""

    def __init__(self, *, in_forward: bool) -> None:
        super().__init__()
        self.used, self.in_forward = nn.Linear(WIDTH, WIDTH, bias=False), in_forward
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.used.weight) if self.in_forward else x)

    def loss(self, output: Tensor) -> Tensor:
        loss = output.square().sum()
        return loss if self.in_forward else loss + self.used.weight.square().sum()


def added_gradients(world: ec.World, *, in_forward: bool, reduction: str) -> None:
    torch.manual_seed(0)
    alone = UsedByParent(in_forward=in_forward).double()
    torch.manual_seed(0)
    model = ec.FSDP(
        UsedByParent(in_forward=in_forward).double(),
        world.group,
        units=ec.units.by_type(nn.Linear),
        strategy=ec.Strategy.NO_SHARD,
        min_num_params=0,
        reduction=reduction,
    )
    batches = torch.randn(3, world.size, 2, WIDTH, dtype=torch.float64)
    for batch in batches:  # without zero_grad() between them
        model.module.loss(model(batch[world.rank])).backward()
        scale = world.size if reduction == "mean" else 1
        for part in batch:
            (alone.loss(alone(part)) / scale).backward()
    for mine, expected in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("in_forward", [True, False])
def test_a_gradient_that_no_output_announces_is_added_to_a_reduced_one(
    in_forward: bool, reduction: str, kind: str
) -> None:
    job = partial(added_gradients, in_forward=in_forward, reduction=reduction)
    run_world(kind, job, 2)


def gradient_of_an_input(world: ec.World) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    rule = ec.units.by_type(nn.Linear)
    model = ec.FSDP(copy.deepcopy(alone), world.group, units=rule, min_num_params=0)
    for batch in torch.randn(2, world.size, 3, WIDTH, dtype=torch.float64):
        alone.zero_grad()
        model.zero_grad()
        alone(batch).square().mean().backward()
        x = batch[world.rank].clone().requires_grad_()
        output = model(x)
        # Where memory is shared, the other rank does nothing, so a reduction would be its next.
        if world.rank == 0 or not world.group.shares_memory:
            (slope,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
            expected = batch[world.rank].clone().requires_grad_()
            torch.testing.assert_close(
                slope, torch.autograd.grad(alone(expected).sum(), expected)[0]
            )
        output.square().mean().backward()
        same_grads(whole_grads(model, world), {n: p.grad for n, p in alone.named_parameters()})


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_no_parameter_accumulates_is_no_step_of_all_ranks(kind: str) -> None:
    run_world(kind, gradient_of_an_input, 2)


class RecomputedAndCalled(nn.Module):
    """Calls a module a second time that reentrant checkpointing has called."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(checkpoint(self.shared, self.first(x), use_reentrant=True))


class Transposed(nn.Module):
    """Has a weight whose gradient is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


SHARED = [lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH), Transposed]


def recomputed_and_called(world: ec.World, shared: int) -> None:
    model = RecomputedAndCalled(SHARED[shared]())
    rule = ec.units.by_type(nn.Linear, nn.LayerNorm, Transposed)
    wrapped = ec.FSDP(model, world.group, units=rule, min_num_params=0)
    wrapped(torch.randn(2, WIDTH)).sum().backward()


@pytest.mark.parametrize("shared", range(len(SHARED)))
def test_a_second_gradient_after_the_first_was_reduced_is_refused_by_name(shared: int) -> None:
    with pytest.raises(ec.StateError, match=r"'shared' got a second gradient.*use_reentrant=Fal"):
        ec.run(recomputed_and_called, 2, args=(shared,))


def moves_in_backward(world: ec.World, loss: Tensor) -> list[str]:
    """The gathers and releases of units in a backward."""
    with events_of(world.rank, "fsdp.gather", "fsdp.release") as events:
        loss.backward()
    return [f"{event.name[5:]} {event.facts['unit']}" for event in events]


def frozen_after_wrapping(world: ec.World) -> list[str]:
    """What happens to the units in a backward, when a parameter of each was frozen later."""
    model = sharded(world, build(FrozenScale))
    for unit in model.module.units:
        unit.linear.bias.requires_grad_(False)
    return moves_in_backward(world, loss_of(model, world.rank))


def test_a_unit_does_not_wait_for_parameters_that_were_frozen_later() -> None:
    found = ec.run(frozen_after_wrapping, 1)[0]
    assert found.index("release units.2") < found.index("gather units.1")
    assert found.index("release units.1") < found.index("gather units.0")


class CalledTwice(nn.Module):
    """A unit that runs twice, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(self.first(x)).tanh())


def called_twice(world: ec.World) -> list[str]:
    """What happens to the units in a backward in another dtype, when a bias was frozen later."""
    low = ec.MixedPrecision(compute=torch.bfloat16)
    rule = ec.units.by_type(nn.Linear)
    model = ec.FSDP(CalledTwice(), world.group, units=rule, min_num_params=0, precision=low)
    model.module.twice.bias.requires_grad_(False)
    return moves_in_backward(world, model(torch.randn(2, WIDTH)).sum())


def test_a_unit_of_another_dtype_that_ran_twice_waits_for_no_parameter_that_was_frozen() -> None:
    found = ec.run(called_twice, 1)[0]
    assert found.index("release twice") < found.index("gather first")


class Inner(nn.Linear):
    """A unit inside of another one."""


class Outer(nn.Module):
    """Takes a derivative of its inner unit in its forward, while both have to stay unsharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), Inner(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(point).tanh().square().sum(), point)
        return self.inner(x - slope).tanh() @ self.first.weight


class Descending(nn.Module):
    """Goes down the slope of its own first layers, and then through them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Outer(), Outer()])
        self.last = nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        with torch.enable_grad():
            point = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.last(self.blocks[0](point)).sum(), point)
        x = x - slope
        for block in self.blocks:
            x = block(x)
        if fails:
            raise KeyError("no output today")
        return self.last(x)


def loss_in_step(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(torch.full((2, 3), 0.3 + step + rank, dtype=torch.float64)).square().mean()


def descend_alone(num_ranks: int) -> dict[str, Tensor]:
    model = Descending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(step: int) -> Iterator[Tensor]:
        for rank in range(num_ranks):
            for other in (0, 5, 9):
                yield loss_in_step(model, step, rank + other) / num_ranks

    return train_alone(model, optimizer, 3, losses)


def descend(world: ec.World, options: dict[str, Any]) -> dict[str, Tensor]:
    units = ec.units.by_type(Outer, Inner)
    model = ec.FSDP(Descending(), world.group, units=units, min_num_params=0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(step: int) -> Iterator[Tensor]:
        loss = loss_in_step(model, step, world.rank)
        with torch.no_grad():
            loss_in_step(model, step, world.rank)
        yield loss
        with model.no_sync():
            yield loss_in_step(model, step, world.rank + 5)
        yield loss_in_step(model, step, world.rank + 9)

    train(optimizer, 3, losses)
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "rows"},
        {"strategy": ec.Strategy.SHARD_OPTIMIZER},
        {"use_orig_params": False},
        {"offload": ec.Offload.ALL, "forward_prefetch": 2},  # gathers communicate
        {"offload": ec.Offload.ALL, "backward_prefetch": ec.BackwardPrefetch.POST},
    ],
)
def test_units_around_a_derivative_in_their_forward_train_as_in_one_process(options) -> None:
    expected = descend_alone(2)
    for state in ec.run(descend, 2, args=(options,)):
        assert_states_close(state, expected, rtol=1e-12, atol=1e-13)


def test_a_forward_that_failed_is_not_under_way_any_more() -> None:
    def main(world: ec.World) -> None:
        model = ec.FSDP(Descending(), world.group, units=ec.units.by_type(Outer), min_num_params=0)
        loss = loss_in_step(model, 0, world.rank)
        with pytest.raises(KeyError):
            model(torch.ones(2, 3, dtype=torch.float64), fails=True)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(ec.local_shard(param).dim() == 1 for param in model.parameters())  # parts

    ec.run(main, 2)


@pytest.mark.parametrize("strategy", [ec.Strategy.FULL_SHARD, ec.Strategy.NO_SHARD])
def test_a_second_derivative_is_refused_for_what_it_would_need(strategy: ec.Strategy) -> None:
    def main(world: ec.World) -> None:
        model = ec.FSDP(nn.Linear(4, 1), world.group, min_num_params=0, strategy=strategy)
        x = torch.ones(2, 4, requires_grad=True)
        with pytest.raises(ec.UnsupportedError, match="reduced gradients have no graph") as caught:
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert ("resharded" in str(caught.value)) == (strategy is ec.Strategy.FULL_SHARD)

    ec.run(main, 2)
