"""Parts are plain tensors in steps of optimizers, and say that they are parts again afterwards."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.modules.optimizer_trial import KNOWN
from echelon.modules.sharded_tensor import ShardedParameter, ShardedTensor
from tests.parts import build


class Step(torch.optim.Optimizer):
    def __init__(self, params) -> None:
        super().__init__(params, {})
        self.errors, self.seen = [], []

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for param in self.param_groups[0]["params"]:
            self.seen += [type(param), type(param.grad)]
            param.sub_(param.grad, alpha=0.1)
        if self.errors:
            raise self.errors.pop()


def kinds(model: nn.Module) -> list[type]:
    return [kind for p in model.parameters() for kind in (type(p), type(p.grad))]


def test_a_step_sees_plain_tensors_and_its_closure_parts() -> None:
    def main(world: ec.World) -> None:
        model = ec.FSDP(build(), world.group, min_num_params=0)
        in_closure: list[list[type]] = []

        def closure() -> None:
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            in_closure.append(kinds(model))

        step, parts = Step(model.parameters()), [ShardedParameter, ShardedTensor] * 2
        step.step(closure)
        assert in_closure == [parts]
        assert step.seen == [nn.Parameter, Tensor] * 2
        assert kinds(model) == parts

    ec.run(main, 2)


def test_a_step_that_raises_leaves_parts() -> None:
    def main(world: ec.World) -> None:
        model = ec.FSDP(build(), world.group, min_num_params=0)
        step = Step(model.parameters())
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        with pytest.raises(KeyError):
            step.step({}.popitem)
        assert kinds(model) == [ShardedParameter, ShardedTensor] * 2
        step.errors.append(OSError("a step"))
        with pytest.raises(OSError, match="a step"):
            step.step()
        assert kinds(model) == [ShardedParameter, ShardedTensor] * 2

    ec.run(main, 2)


def test_an_optimizer_that_stepped_before_wrapping_goes_on() -> None:
    def main(world: ec.World, layout: str) -> dict[str, Tensor]:
        model: nn.Module = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 2 and layout != "whole":
                model = ec.FSDP(model, world.group, min_num_params=0, layout=layout)
            optimizer.zero_grad()
            (model(torch.ones(1, 3, dtype=torch.float64)) - step).square().sum().backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    expected = ec.run(main, 1, args=("whole",))[0]
    for layout in ("flat", "rows"):
        for found in ec.run(main, 3, args=(layout,)):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


class Scaled(nn.Module):
    """A model with a scalar, or of a scalar alone, whose states have no dims either."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.layer = nn.Identity() if alone else build()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def own_load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def load_by_name(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model.load_optimizer_state_dict(optimizer, model.optimizer_state_dict(optimizer))


def load_by_number(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """The whole state, as one process has it."""
    whole, names = model.optimizer_state_dict(optimizer), dict(model.named_parameters())
    numbered = optimizer.state_dict()
    numbered["state"] = {i: whole["state"].get(name, {}) for i, name in enumerate(names)}
    optimizer.load_state_dict(numbered)


def load_saved(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    ec.save(folder, step=1, model=model, optimizer=optimizer)
    ec.load(folder, model=model, optimizer=optimizer)


@pytest.mark.parametrize("alone", [False, True])
def test_states_of_a_scalar_are_parts_or_numbers_after_each_load(
    alone: bool, tmp_path: Path
) -> None:
    def main(world: ec.World, make: Any, load: Any, folder: str) -> dict[str, Tensor]:
        wrap = ec.DDP if world.size == 1 else partial(ec.FSDP, min_num_params=0)
        model = wrap(Scaled(alone=alone), world.group)
        optimizer = make(model.parameters())
        for step in range(3):
            if step == 2:
                load(model, optimizer, folder)
            optimizer.zero_grad()
            (model(torch.ones(1, 3, dtype=torch.float64)) - step).square().sum().backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    makes = [partial(kind, lr=0.01) for kind in sorted(KNOWN, key=lambda kind: kind.__name__)]
    makes += [partial(torch.optim.NAdam, foreach=False), partial(torch.optim.ASGD, foreach=False)]
    loads = [own_load, load_by_name, load_by_number, load_saved]
    for i, (make, load) in enumerate(product(makes, loads)):
        # Loads differ in the dtype that a number gets.
        expected = ec.run(main, 1, args=(make, load, str(tmp_path / f"{i} whole")))[0]
        for found in ec.run(main, 2, args=(make, load, str(tmp_path / f"{i} parts"))):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
