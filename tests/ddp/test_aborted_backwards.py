"""A backward that raised and was caught on all ranks leaves gradients as they were before it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.ddp.models import Opaque, Wrapping
from tests.worlds import events_of, run_world

RANKS = 2
SMALL_SUM: dict[str, Any] = {"bucket_bytes": 0, "first_bucket_bytes": 0, "reduction": "sum"}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_bytes": 0, "first_bucket_bytes": 0},
    SMALL_SUM,
    {"reduction": 5.0},
    {"gradient_dtype": torch.float32, "first_bucket_bytes": 0},
]


class Failed(Exception):
    """What the backwards of these tests raise."""


def fail(grad: Tensor) -> None:
    """Raise it, as a hook of a tensor."""
    raise Failed


class Layers(nn.Module):
    """Two layers; the backward may fail before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4).double()
        self.second = nn.Linear(4, 2).double()

    def forward(self, x: Tensor, failure: str | None = None) -> Tensor:
        x = x.clone().requires_grad_()
        hidden = self.first(2 * x).tanh()
        output: Tensor = self.second(hidden)
        places = {"before": output, "between": hidden, "after": x}
        if failure is not None:
            places[failure].register_hook(fail)
        return output


def scale(options: dict[str, Any]) -> float:
    """The reduced gradient divided by that of the mean over ranks."""
    reduction = options.get("reduction", "mean")
    divisor = {"mean": float(RANKS), "sum": 1.0}.get(reduction, reduction)
    return RANKS / divisor


def run_backward(model: Any, rank: int | None, step: int, failure: str | None = None) -> None:
    """A backward of the batch of a rank, or of all ranks (None); a failure is caught."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(RANKS, 2, 3, generator=generator, dtype=torch.float64)
    x = x.flatten(0, 1) if rank is None else x[rank]
    if failure is None:
        model(x).square().mean().backward()
    else:
        with pytest.raises(Failed):
            model(x, failure).square().mean().backward()


def gradients(model: Any) -> list[Tensor | None]:
    """Copies of them."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_gradients(
    model: ec.DDP, expected: list[Tensor | None], factor: float = 1.0, rtol: float = 1e-5
) -> None:
    """Check that they are ``factor`` times the expected ones."""
    for grad, value in zip(gradients(model), expected, strict=True):
        assert (grad is None) == (value is None)
        if grad is not None and value is not None:
            torch.testing.assert_close(grad, value * factor, rtol=rtol, atol=1e-6)


@contextmanager
def nothing_is_reduced(world: World) -> Iterator[None]:
    """Check that the body starts no reduction."""
    with events_of(world.rank, "ddp.bucket") as events:
        yield
    assert not events


def local_backwards_follow(world: World, choices: list[dict[str, Any]]) -> None:
    for options in choices:
        for failure in ("before", "between", "after"):
            for drops, ends in ((False, "sync"), (True, "sync"), (True, "backward")):
                plain, model = Layers(), ec.DDP(Layers(), world.group, **options)
                run_backward(model, world.rank, 0)
                model.zero_grad()
                run_backward(model, world.rank, 1, failure)
                if drops:
                    model.zero_grad()
                for step in (2, 3):
                    with model.no_sync(), nothing_is_reduced(world):
                        run_backward(model, world.rank, step)
                    run_backward(plain, None, step)
                if ends == "sync":
                    model.sync_gradients()
                else:
                    run_backward(model, world.rank, 4)
                    run_backward(plain, None, 4)
                assert_gradients(model, gradients(plain), scale(options))


def kept_ones_stay(world: World, choices: list[dict[str, Any]]) -> None:
    for options in choices:
        for failure in ("before", "between", "after"):
            plain, model = Layers(), ec.DDP(Layers(), world.group, **options)
            for step in (0, 1, 2):
                run_backward(model, world.rank, step)
                run_backward(plain, None, step)
                before = gradients(model)
                for _ in range(2):
                    run_backward(model, world.rank, step + 10, failure)
                    assert_gradients(model, before, rtol=0)
            if step == 2:
                with model.no_sync():
                    run_backward(model, world.rank, 3)
                run_backward(plain, None, 3)
                model.sync_gradients()
            assert_gradients(model, gradients(plain), scale(options))


def local_ones_stay_local(world: World, choices: list[dict[str, Any]]) -> None:
    for options in choices:
        for failure in ("before", "between", "after"):
            for kept in (False, True):
                plain, model = Layers(), ec.DDP(Layers(), world.group, **options)
                if kept:
                    run_backward(model, world.rank, 0)
                    run_backward(plain, None, 0)
                with model.no_sync():
                    run_backward(model, world.rank, 1)
                run_backward(plain, None, 1)
                for one, rank in ((model, world.rank), (plain, None)):
                    run_backward(one, rank, 2, failure)
                with model.no_sync():
                    run_backward(model, world.rank, 3)
                run_backward(plain, None, 3)
                model.sync_gradients()
                assert_gradients(model, gradients(plain), scale(options))


def optimizers_may_step(world: World, choices: list[dict[str, Any]]) -> None:
    for options, failure in product(choices, ("before", "between", "after")):
        plain, model = Layers(), ec.DDP(Layers(), world.group, **options)
        for one, rank in ((model, world.rank), (plain, None)):
            rate = 0.1 / scale(options) if one is model else 0.1
            optimizer = torch.optim.SGD(one.parameters(), lr=rate)
            for step in range(4):
                run_backward(one, rank, step)
                if one is model:
                    run_backward(one, rank, step + 10, failure)
                optimizer.step()
                optimizer.zero_grad()
                if one is model:
                    run_backward(one, rank, step + 10, failure)
                    optimizer.step()  # there is no gradient
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def unannounced_ones_follow(world: World, choices: list[dict[str, Any]]) -> None:
    for options, failure in product(choices, ("before", "between")):
        plain, model = Layers(), ec.DDP(Wrapping(Layers(), Opaque), world.group, **options)

        def hidden(x: Tensor, model: ec.DDP = model) -> Tensor:
            output: Tensor = model(x).logits
            return output

        run_backward(hidden, world.rank, 0)
        model.zero_grad()
        x = torch.ones(2, 3, dtype=torch.float64)
        output = model.inner(x, failure)
        model.reduce_in_backward_of(output)
        with pytest.raises(Failed):
            output.sum().backward()
        with model.no_sync(), nothing_is_reduced(world):
            run_backward(hidden, world.rank, 1)
        model.sync_gradients()
        run_backward(plain, None, 1)
        assert_gradients(model, gradients(plain), scale(options))


Check = Callable[[World, list[dict[str, Any]]], None]
CHECKS: list[Check] = [
    local_backwards_follow,
    kept_ones_stay,
    local_ones_stay_local,
    optimizers_may_step,
    unannounced_ones_follow,
]


def check_all(world: World) -> None:
    for check in CHECKS:
        check(world, [SMALL_SUM])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_after_an_aborted_backward(check: Check) -> None:
    ec.run(check, RANKS, args=(OPTIONS,))


@pytest.mark.slow
def test_gradients_after_an_aborted_backward_are_right_between_processes() -> None:
    run_world("processes", check_all, RANKS)


def test_a_sync_that_raised_may_be_called_again() -> None:
    def main(world: World) -> None:
        for options in OPTIONS:
            plain, model = Layers(), ec.DDP(Layers(), world.group, **options)
            with model.no_sync():
                run_backward(model, world.rank, 1)
            run_backward(plain, None, 1)
            grad = model.first.weight.grad
            model.first.weight.grad = grad.to_sparse()
            with pytest.raises(ec.errors.UnsupportedError, match="dense gradients only"):
                model.sync_gradients()
            model.first.weight.grad = grad
            model.sync_gradients()
            assert_gradients(model, gradients(plain), scale(options))

    ec.run(main, RANKS)


class Writes(Layers):
    """A forward that writes a parameter, on one rank."""

    def forward(self, x: Tensor, failure: str | None = None) -> Tensor:
        output = super().forward(x, failure)
        if failure is not None:
            with torch.no_grad():
                self.first.bias.add_(self.step)
        return output


def test_a_write_by_a_forward_whose_backward_was_aborted_is_still_found() -> None:
    def main(world: World) -> None:
        inner = Writes()
        inner.step = float(world.rank)
        model = ec.DDP(inner, world.group)
        run_backward(model, world.rank, 0)
        run_backward(model, world.rank, 1)
        run_backward(model, world.rank, 2, "after")  # all buckets have left
        with pytest.raises(ec.errors.ModelMismatch, match=r"values of parameter 'first\.bias'"):
            run_backward(model, world.rank, 3)

    ec.run(main, RANKS)
