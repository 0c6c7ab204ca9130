"""A backward that raised and was caught on all ranks leaves gradients as they were before it."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import StateError
from tests.fsdp.kinds import KINDS, model, wrapped
from tests.worlds import run_world

PLACES = (0, 1)  # before the backward of these layers; the last unit is complete, or is not left
DATA = torch.arange(32.0).view(8, 4).sin()


class Failed(Exception):
    """What the backwards of these tests raise."""


def run_backward(one: Any, x: Tensor, place: int | None = None) -> None:
    """A backward, which fails at a layer, if one is named, and is caught."""
    if place is None:
        one(x).square().mean().backward()
        return

    def fail(gradient: Tensor) -> None:
        raise Failed

    def watch(layer: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    layers = one.module if isinstance(one, ec.FSDP) else one
    handle = layers[place].register_forward_hook(watch)
    with pytest.raises(Failed):
        one(x).square().mean().backward()
    handle.remove()


def part(world: ec.World) -> Tensor:
    """The batch of this rank."""
    return DATA[world.rank :: world.size]


def assert_like(one: ec.FSDP, plain: nn.Module) -> None:
    state = one.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)


def steps_at_once(world: ec.World, name: str) -> None:
    """With and without gradients of an earlier backward, an optimizer steps with those alone."""
    for place, has_earlier, zeros in product(PLACES, (False, True), (False, True)):
        plain, one = model(), wrapped(world, name)
        for each, x in ((plain, DATA), (one, part(world))):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
            for step in range(2):
                if has_earlier:
                    run_backward(each, x + step)
                if each is one:
                    for again in range(2):
                        run_backward(each, x - again, place)
                optimizer.step()
                optimizer.zero_grad(set_to_none=not zeros)
        assert_like(one, plain)


def trains_on(world: ec.World, name: str) -> None:
    """The next backwards, kept ones among them, add to what was there before it."""
    for place, drops, kept in product(PLACES, (False, True), (False, True)):
        plain, one = model(), wrapped(world, name)
        for each, x in ((plain, DATA), (one, part(world))):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for step in range(2):
                run_backward(each, x + step)
                if each is one:
                    run_backward(each, x, place)
                if drops:
                    each.zero_grad()
                if isinstance(each, ec.FSDP) and kept:
                    with each.no_sync():
                        run_backward(each, x - step)
                    each.sync_gradients()
                else:
                    run_backward(each, x - step)
                optimizer.step()
                optimizer.zero_grad()
        assert_like(one, plain)


def whole_state_is_there(world: ec.World, name: str) -> None:
    """What asks for the state after it gets that of before it, and a checkpoint may be saved."""
    plain, one = model(), wrapped(world, name)
    run_backward(one, part(world), 1)
    whole = one.whole_state_dict(rank0_only=False)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(whole[key], value)
    assert all(parameter.grad is None for parameter in one.parameters())


def is_lost(gradient: Tensor | None) -> bool:
    try:
        float(gradient.sum())  # type: ignore[union-attr]
    except StateError as error:
        return "a backward that raised had taken the gradients" in str(error)
    return False


def kept_ones_are_there_or_lost(world: ec.World, name: str) -> None:
    """What had joined a reduction is refused until it is dropped; the rest is still kept."""
    for drop_to_none in (True, False):
        plain, one = model(), wrapped(world, name)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        with one.no_sync():
            run_backward(one, part(world))
        run_backward(one, part(world), 0)
        gradients = [parameter.grad for parameter in one.parameters()]
        assert is_lost(gradients[-1])  # of the last layer, whose unit is complete
        with pytest.raises(StateError, match=r"zero_grad\(\) and repeat"):
            optimizer.step()
        with pytest.raises(StateError, match=r"zero_grad\(\) and repeat"):
            run_backward(one, part(world))
        optimizer.zero_grad(set_to_none=drop_to_none)
        for each, x in ((plain, DATA), (one, part(world))):
            run_backward(each, x + 1)
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert_like(one, plain)


def under_no_sync(world: ec.World, name: str) -> None:
    """A kept backward that failed leaves what others have kept to the next reduction."""
    plain, one = model(), wrapped(world, name)
    for each, x in ((plain, DATA), (one, part(world))):
        if isinstance(each, ec.FSDP):
            with each.no_sync():
                run_backward(each, x)
                run_backward(each, x - 1, 2)  # before any gradient was there
            run_backward(each, x + 1)
        else:
            run_backward(each, x)
            run_backward(each, x + 1)
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_like(one, plain)


CHECKS = (steps_at_once, trains_on, whole_state_is_there, under_no_sync)


def check_all(world: ec.World, name: str) -> None:
    for check in CHECKS:
        check(world, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_an_aborted_backward_leaves_gradients_and_parameters_as_they_were(name: str) -> None:
    ec.run(check_all, 4 if name == "hybrid" else 2, args=(name,))


@pytest.mark.parametrize("name", ["flat", "replicated"])
def test_an_optimizer_may_step_after_an_aborted_backward(name: str) -> None:
    ec.run(steps_at_once, 2, args=(name,))


def check_kinds(world: ec.World, names: tuple[str, ...]) -> None:
    for name in names:
        check_all(world, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_it_is_so_where_ranks_share_memory_and_over_gloo(kind: str) -> None:
    names = ("flat", "rows", "flat parameters", "zero 1", "replicated", "offloaded")
    run_world(kind, check_kinds, 2, args=(names,))


@pytest.mark.parametrize("name", ["flat", "rows", "zero 2", "summed wider", "offloaded"])
def test_kept_gradients_that_had_joined_an_aborted_reduction_are_lost_by_name(name: str) -> None:
    ec.run(kept_ones_are_there_or_lost, 2, args=(name,))


def fails_inside_a_forward(world: ec.World) -> None:
    """A backward inside of a forward fails and is caught there; the forward goes on."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with pytest.raises(Failed), torch.enable_grad():
                    y = self.layers(x).sum()
                    y.register_hook(raise_failed)
                    y.backward()
            output: Tensor = self.layers(x)
            return output

    def raise_failed(gradient: Tensor) -> None:
        raise Failed

    plain, one = Inner(), ec.FSDP(Inner(), world.group, **KINDS["flat"])
    plain.eval()
    for each, x in ((plain, DATA), (one, part(world))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(2):
            run_backward(each, x + step)
            optimizer.step()
            optimizer.zero_grad()
    assert_like(one, plain)


def test_a_forward_goes_on_after_a_backward_inside_of_it_that_was_aborted() -> None:
    ec.run(fails_inside_a_forward, 2)


def test_sync_gradients_waits_for_the_reductions_of_an_aborted_backward() -> None:
    def main(world: ec.World) -> None:
        one = wrapped(world, "flat")
        for place in (None, None, 0):  # the order of reductions is known after the first
            one.zero_grad()
            run_backward(one, part(world), place)
        aborted = one._hooks.backward._pass
        reductions = [reduction for started in aborted.reductions for reduction in started]
        assert reductions
        one.sync_gradients()
        assert all(reduction._is_over for reduction in reductions)

    ec.run(main, 2)
