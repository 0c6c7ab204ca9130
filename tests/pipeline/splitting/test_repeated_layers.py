"""A module that is several layers is run as often, and what is in no layer is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import ArgumentError
from echelon.pipeline.splitting.split import split
from tests.worlds import run_world


def repeating(seed: int = 0) -> nn.Sequential:
    """An activation that is four layers, and a layer with weights that is two of them."""
    torch.manual_seed(seed)
    act, shared = nn.Tanh(), nn.Linear(4, 4)
    return nn.Sequential(
        nn.Linear(4, 4), act, shared, act, nn.Linear(4, 4), act, shared, act, nn.Linear(4, 2)
    ).double()


class Repeating(nn.Module):
    """The same, whose layers the model names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.shared, _, self.second, *_, self.last = repeating()

    def pipeline_layers(self) -> list[nn.Module]:
        act = self.act
        return [self.first, act, self.shared, act, self.second, act, self.shared, act, self.last]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.pipeline_layers():
            x = layer(x)
        return x


@pytest.mark.parametrize("make", [repeating, Repeating])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 9])
def test_stages_run_each_layer_as_often_as_the_model(
    make: Callable[[], nn.Module], stages: int
) -> None:
    model, x = make(), torch.randn(3, 4, dtype=torch.float64)
    parts = split(model, stages, cost=[1] * 9)
    output = x
    for part in parts:
        output = part(output)
    assert torch.equal(output, model(x))
    if make is repeating:
        names = [name for part in parts for name in part.state_dict()]
        assert sorted(names) == sorted(model.state_dict())


PLANS = [
    ec.Plan(pp=2, microbatches=2),
    ec.Plan(pp=3, microbatches=4),
    ec.Plan(pp=2, shard=2, microbatches=2),
]


def train(world: ec.World, make: Callable[[], nn.Module], plan: ec.Plan | None) -> list[Tensor]:
    model = make()
    if plan is None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for x, y in batches():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return list(model.state_dict().values())
    pipe: Any = ec.parallelize(model, plan, world, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    size = plan.shard
    for x, y in batches():
        at = world.rank % size
        optimizer.zero_grad()
        pipe.step(x[at::size], target=y[at::size])
        optimizer.step()
    whole = pipe.whole_state_dict(rank0_only=False)
    return [whole[name] for name in model.state_dict()]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 4, generator=generator, dtype=torch.float64),
            torch.randn(8, 2, generator=generator, dtype=torch.float64),
        )
        for _ in range(4)
    ]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("make", [repeating, Repeating])
def test_a_model_with_repeated_layers_trains_in_stages_as_in_one_process(
    make: Callable[[], nn.Module], plan: ec.Plan
) -> None:
    (expected,) = run_world("threads", train, 1, args=(make, None))
    ranks = plan.pp * plan.shard
    for found in run_world("threads", train, ranks, args=(make, plan)):
        torch.testing.assert_close(found, expected)


# --- what is refused ------------------------------------------------------------------------------


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return 3 * output


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def hooked(register: str) -> nn.Sequential:
    model = plain()
    getattr(model, register)(lambda *args: None)
    return model


def with_own(register: str, value: Tensor) -> nn.Sequential:
    model = plain()
    getattr(model, register)("own", value)
    return model


def with_forward() -> nn.Sequential:
    model = plain()
    model.forward = lambda x: x  # type: ignore[method-assign]
    return model


class BlocksAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(2, 2)
        self.layers = nn.ModuleList([block, nn.Linear(2, 2), block])


def normalized() -> nn.Sequential:
    norm = nn.BatchNorm1d(2)
    return nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 2), norm)


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Scaled(nn.Linear(2, 2), nn.Linear(2, 2)), "a Scaled, has a forward of its own"),
        (with_forward(), "a Sequential, has a forward of its own"),
        *((hooked(register), "a Sequential, has hooks") for register in HOOKS),
        (with_own("register_parameter", nn.Parameter(torch.ones(2))), r"\['own'\] of the model"),
        (with_own("register_buffer", torch.ones(2)), r"\['own'\] of the model"),
        (BlocksAgain(), "block 2 of 'layers' is block 0 again"),
        (normalized(), "layer 3 of the model, a BatchNorm1d with buffers, is also a layer of"),
    ],
)
def test_a_model_that_does_more_than_its_layers_is_refused(model: nn.Module, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        split(model, 2)


def test_a_layer_with_buffers_may_be_repeated_in_one_stage() -> None:
    model, plain_model = normalized(), normalized()
    plain_model.load_state_dict(model.state_dict())
    first, second = split(model, 2, cost=[9, 1, 1, 1])
    x = torch.randn(4, 2)
    assert torch.equal(second(first(x)), plain_model(x))
    assert all(map(torch.equal, model.state_dict().values(), plain_model.state_dict().values()))
