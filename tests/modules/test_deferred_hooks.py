"""Hooks on accumulated gradients get reduced ones: optimizers may step there, loggers may look."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.reference import train_alone
from tests.worlds import run_world

STEPS = 4
LINEAR = ec.units.by_type(nn.Linear)
Wrap = Callable[[nn.Module, ec.World], Any]
FSDP: dict[str, Any] = {"units": LINEAR, "min_num_params": 0}


def net() -> nn.Sequential:
    """The last bias is one number, so that most ranks have an empty part of it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def rows(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def plain() -> dict[str, Tensor]:
    """What one process has after ``STEPS`` steps on the batches of all ranks."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return train_alone(model, optimizer, STEPS, lambda step: [loss_of(model, rows(step))])


def step_in_backward(model: nn.Module, shapes: list[Any]) -> list[Any]:
    """What PyTorch's tutorial does; returns the handles."""
    optimizers = {p: torch.optim.AdamW([p], lr=0.05, foreach=False) for p in model.parameters()}

    def hook(param: nn.Parameter) -> None:
        assert param.grad is not None
        assert not torch.is_grad_enabled()
        shapes.append((param.shape, param.grad.shape))
        optimizers[param].step()
        optimizers[param].zero_grad()

    return [param.register_post_accumulate_grad_hook(hook) for param in optimizers]


def ways(kind: str) -> Iterator[tuple[str, Wrap, bool]]:
    """By name, how a model is wrapped, and whether hooks may come before that."""
    yield "ddp", lambda m, w: ec.DDP(m, w.group), True
    yield "ddp, a bucket each", lambda m, w: ec.DDP(m, w.group, bucket_bytes=1), True
    yield "ddp, manual", lambda m, w: ec.DDP(m, w.group, sync="manual"), True
    for strategy, layout in product(ec.Strategy, ("flat", "rows")):
        is_refused = strategy is ec.Strategy.NO_SHARD and layout == "rows"
        if strategy.name.startswith("HYBRID") or is_refused:
            continue
        options = {**FSDP, "strategy": strategy, "layout": layout}
        yield f"{strategy.name}, {layout}", lambda m, w, o=options: ec.FSDP(m, w.group, **o), True
        if layout == "flat" or kind == "gloo":
            one = {**options, "use_orig_params": False}
            yield (
                f"{strategy.name}, {layout}, one",
                lambda m, w, o=one: ec.FSDP(m, w.group, **o),
                False,
            )


def train(world: ec.World, wrap: Wrap, when: str, is_manual: bool) -> dict[str, Tensor]:
    module, shapes = net(), list[Any]()
    if when == "before":
        step_in_backward(module, shapes)
    model = wrap(module, world)
    if when == "after":
        step_in_backward(model, shapes)
    for step in range(STEPS):
        loss = loss_of(model, rows(step)[world.rank :: world.size])
        if when == "between" and not step:
            step_in_backward(model, shapes)
        loss.backward()
        if is_manual:
            model.sync_gradients()
    assert all(param.grad is None for param in model.parameters())
    num = len(list(model.parameters()))
    assert len(shapes) == STEPS * num, "once a parameter and step"
    assert shapes[:num] == [(s, s) for s, _ in shapes[:num]]
    seen = sum(shape.numel() for shape, _ in shapes[:num])
    assert seen == sum(param.numel() for param in model.parameters()), "of this rank's parts"
    return model.state_dict()


def train_all(world: ec.World, kind: str) -> dict[str, dict[str, Tensor]]:
    return {
        f"{name}; hooks {when} wrapping": train(world, wrap, when, name.endswith("manual"))
        for name, wrap, may_be_early in ways(kind)
        for when in ("before", "after", "between")
        if may_be_early or when != "before"
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"), [("threads", 1), ("threads", 3), ("processes", 2), ("gloo", 2)]
)
def test_an_optimizer_steps_in_hooks_as_in_one_process(kind: str, ranks: int) -> None:
    expected = plain()
    for found in run_world(kind, train_all, ranks, (kind,)):
        for how, state in found.items():
            for name, value in expected.items():
                torch.testing.assert_close(
                    state[name],
                    value,
                    rtol=1e-12,
                    atol=1e-12,
                    msg=lambda text, how=how: f"{how}: {text}",
                )


def wrapped(module: nn.Module, world: ec.World, technique: str, **options: Any) -> Any:
    if technique == "ddp":
        return ec.DDP(module, world.group, **options)
    return ec.FSDP(module, world.group, **FSDP, **options)


def log_gradients(world: ec.World, technique: str) -> None:
    """A logger adds up what it sees; under ``no_sync`` it sees nothing until the reduction."""
    module = net()
    seen: list[Tensor] = []
    handle = module[0].bias.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.clone())
    )
    model = wrapped(module, world, technique)
    with model.no_sync():
        loss_of(model, rows(0)[world.rank :: world.size]).backward()
    assert not seen
    model.sync_gradients()
    assert len(seen) == 1
    assert torch.equal(seen[0], module[0].bias.grad)
    loss_of(model, rows(1)[world.rank :: world.size]).backward()
    assert len(seen) == 2, "what is accumulated, as in one process"
    assert torch.equal(seen[1], module[0].bias.grad)
    handle.remove()
    later = module[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    later.remove()
    loss_of(model, rows(2)[world.rank :: world.size]).backward()
    assert len(seen) == 2


def keep_hooks(world: ec.World, technique: str) -> None:
    """Hooks are the module's again when the wrapper goes; a copy has none, as torch copies none."""
    module = net()
    names: list[str] = []
    module[0].weight.register_post_accumulate_grad_hook(lambda p: names.append("weight"))
    model = wrapped(module, world, technique)
    loss_of(model, rows(0)).backward()
    loss_of(copy.deepcopy(model), rows(0)).backward()
    assert names == ["weight"]
    module = model.unwrap()
    loss_of(module, rows(0)).backward()
    assert names == ["weight"] * 2


def skip_on_some(world: ec.World, technique: str) -> None:
    """All ranks call the hooks of what one has used, and none those of what nobody has."""
    module = nn.ModuleList([nn.Linear(2, 2).double() for _ in range(3)])
    names: list[str] = []
    for name, param in module.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: names.append(name))

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: Tensor, picks: list[int]) -> Tensor:
            for i in picks:
                x = self.layers[i](x)
            return x

    model = wrapped(Picks(), world, technique)
    model(torch.ones(1, 2, dtype=torch.float64), [0, 1] if world.rank else [0]).sum().backward()
    assert sorted(names) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert len(set(world.group.all_gather_object(tuple(names)))) == 1, "in one order"


def leave_ignored(world: ec.World, technique: str) -> None:
    """Autograd calls the hooks of a parameter that nobody reduces, under ``no_sync`` as well."""
    module = net()
    seen: list[torch.Size] = []
    module[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    model = wrapped(module, world, technique, ignored=[module[2].bias])
    with model.no_sync():
        loss_of(model, rows(0)).backward()
    assert seen == [torch.Size([1])]


def check_all(world: ec.World) -> None:
    for check in (log_gradients, keep_hooks, skip_on_some, leave_ignored):
        for technique in ("ddp", "fsdp"):
            check(world, technique)


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_hooks_see_what_ranks_have_reduced(kind: str) -> None:
    run_world(kind, check_all, 2)


def test_a_wrapper_that_is_dropped_is_freed_and_leaves_hooks_to_autograd() -> None:
    def main(world: ec.World) -> None:
        module = net()
        names: list[str] = []
        module[0].weight.register_post_accumulate_grad_hook(lambda p: names.append("weight"))
        model = ec.DDP(module, world.group)
        loss_of(model, rows(0)).backward()
        assert names == ["weight"]
        find = weakref.ref(model)
        del model
        gc.collect()
        assert find() is None
        loss_of(module, rows(0)).backward()
        assert names == ["weight"] * 2
        model = ec.DDP(module, world.group)
        loss_of(model, rows(0)).backward()
        assert names == ["weight"] * 3

    ec.run(main, 1)


def hook_before_a_flat_parameter(world: ec.World) -> None:
    module = net()
    module[0].bias.register_post_accumulate_grad_hook(lambda p: None)
    model = ec.FSDP(module, world.group, use_orig_params=False, **FSDP)
    loss_of(model, rows(0)).backward()


class Aside(nn.Module):
    """Its loss goes around its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> None:
        hidden = self.layer(x).sum()
        self.aside = lambda: hidden


def hook_behind_the_back(world: ec.World) -> None:
    model = ec.DDP(Aside(), world.group)
    model(torch.ones(1, 2))
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: None)
    model.module.aside().backward()


def step_too_early(world: ec.World) -> None:
    module = net()
    model = ec.FSDP(module, world.group, **FSDP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = rows(0).requires_grad_()
    x.register_hook(lambda grad: optimizer.step())
    loss_of(model, x).backward()


def step_in_a_forward(world: ec.World) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            self.layer(x).sum().backward()
            return self.layer(x)

    model = ec.FSDP(Inner(), world.group, **FSDP)
    step_in_backward(model, [])
    model(rows(0))


@pytest.mark.parametrize(
    ("main", "text"),
    [
        (hook_before_a_flat_parameter, r"'0.bias', which FSDP has put into a flat parameter"),
        (hook_behind_the_back, "was registered on the gradient of parameter 'layer"),
        (step_too_early, "inside a backward, before the gradients of all ranks are reduced"),
        (step_in_a_forward, "in a hook on a gradient, while a forward is under way"),
    ],
)
def test_what_cannot_be_is_refused(main: Callable[[ec.World], None], text: str) -> None:
    with pytest.raises(ec.StateError, match=text):
        ec.run(main, 2, timeout=20)
