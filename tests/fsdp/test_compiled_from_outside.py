"""What is compiled after FSDP has wrapped the model trains as without a compiler."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import echelon as ec
from tests.worlds import run_world

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler, about its own code


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


Step = Callable[[torch.Tensor], None]


def compiled(code):
    return torch.compile(code, backend="aot_eager")


def plain_step(model, optimizer) -> Step:
    def step(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def nothing(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    return plain_step(model, optimizer)


def the_wrapper(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    return plain_step(compiled(model), optimizer)


def the_wrapper_in_place(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    model.compile(backend="aot_eager")
    return plain_step(model, optimizer)


def the_module_inside(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    model.module.compile(backend="aot_eager")
    return plain_step(model, optimizer)


def a_unit_in_place(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    model.module.first.compile(backend="aot_eager")
    return plain_step(model, optimizer)


def the_forward_of_a_unit(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    model.module.first.forward = compiled(model.module.first.forward)
    return plain_step(model, optimizer)


def a_part_of_the_root(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    model.module.head.compile(backend="aot_eager")
    return plain_step(model, optimizer)


def the_forward_of_the_model(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    model.module.forward = compiled(model.module.forward)
    return plain_step(model, optimizer)


def the_step_of_the_optimizer(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    step, plain = compiled(optimizer.step), plain_step(model, optimizer)
    optimizer.step = step
    return plain


def the_whole_step(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    return compiled(plain_step(model, optimizer))


def a_loss_of_the_model(model: ec.FSDP, optimizer: torch.optim.Optimizer) -> Step:
    loss_of = compiled(lambda x: model(x).square().mean())

    def step(x):
        loss_of(x).backward()
        ec.clip_grad_norm_(model, 1e9)
        optimizer.step()
        optimizer.zero_grad()

    return step


WAYS = (
    the_wrapper,
    the_wrapper_in_place,
    the_module_inside,
    a_unit_in_place,
    the_forward_of_a_unit,
    a_part_of_the_root,
    the_forward_of_the_model,
    the_step_of_the_optimizer,
    the_whole_step,
    a_loss_of_the_model,
)


def trained(world: ec.World, way, layout: str, make_optimizer) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    units = ec.units.by_type(Block)
    model = ec.FSDP(Net().double(), world.group, min_num_params=0, units=units, layout=layout)
    step = way(model, make_optimizer(model.parameters()))
    data = torch.randn(4, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for x in data:
        step(x[world.rank :: 2])
    return model.state_dict()


def check(world: ec.World, way, layout: str, make_optimizer) -> None:
    expected = trained(world, nothing, layout, make_optimizer)
    actual = trained(world, way, layout, make_optimizer)
    assert list(actual) == list(expected)
    for name, value in expected.items():
        # The compiler may add in another order.
        torch.testing.assert_close(
            actual[name], value, rtol=1e-12, atol=1e-12, msg=f"{way.__name__}: {name}"
        )


def rmsprop(params):
    return torch.optim.RMSprop(params, lr=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def check_all(world: ec.World) -> None:
    for way in WAYS:
        check(world, way, "flat", sgd)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("layout", "make_optimizer"), [("flat", rmsprop), ("rows", sgd)])
def test_a_step_is_that_without_a_compiler_with(way, layout, make_optimizer):
    run_world("threads", check, 2, (way, layout, make_optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_a_step_is_that_without_a_compiler_over(kind):
    run_world(kind, check_all, 2)
