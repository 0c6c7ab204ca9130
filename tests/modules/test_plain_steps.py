"""Parts are plain tensors in steps of optimizers, and say that they are parts again afterwards."""

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
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
