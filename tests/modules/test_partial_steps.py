"""Optimizers that look beyond single elements are refused where a rank has parts or stages."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import UnsupportedError
from tests import reference
from tests.worlds import run_world

WIDTH = 6


class LAMB(torch.optim.SGD):
    """Scales each step by the norm of its tensor; torch has no such optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                trust = param.norm() / (param.grad.norm() + 1e-6)
                param.sub_(param.grad * trust, alpha=group["lr"])


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))]


def rows(rank: int = 0) -> Tensor:
    return reference.rows(rank, 4, WIDTH, dtype=torch.float32)


OPTIMIZERS = {
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
    "LAMB": partial(LAMB, lr=0.1),
}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if "bias" not in name]


def check_parts(world: ec.World, name: str) -> None:
    options: dict[str, Any] = {"min_num_params": 0, "layout": "rows"}
    model = ec.FSDP(nn.Sequential(*layers()), world.group, **options)
    before = model.state_dict()
    optimizer = OPTIMIZERS[name](matrices(model))
    model(rows(world.rank)).square().mean().backward()
    with pytest.raises(UnsupportedError, match=rf"a step of {name} .* FSDP shards parameters"):
        optimizer.step(lambda: torch.zeros(()))
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    model = ec.FSDP(
        nn.Sequential(*layers()), world.group, strategy=ec.Strategy.NO_SHARD, min_num_params=0
    )
    model(rows(world.rank)).square().mean().backward()
    OPTIMIZERS[name](matrices(model)).step(lambda: torch.zeros(()))
    module = ec.FSDP(nn.Sequential(*layers()), world.group, **options).unwrap()
    module(rows()).square().mean().backward()
    OPTIMIZERS[name](matrices(module)).step(lambda: torch.zeros(()))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_step_that_needs_whole_tensors_is_refused_for_parts(name: str) -> None:
    run_world("threads", partial(check_parts, name=name), 2)


def step_alone(world: ec.World, name: str) -> None:
    model = ec.FSDP(nn.Sequential(*layers()), world.group, min_num_params=0, layout="rows")
    model(rows()).square().mean().backward()
    OPTIMIZERS[name](matrices(model)).step(lambda: torch.zeros(()))


def test_a_rank_alone_has_all_of_the_model() -> None:
    run_world("threads", partial(step_alone, name="LBFGS"), 1)


def step_flattened(world: ec.World, options: dict[str, Any]) -> None:
    """One step of Adafactor of parameters in one dim would be that of other matrices."""
    model = ec.FSDP(nn.Sequential(*layers()), world.group, min_num_params=0, **options)
    model(rows(world.rank)).square().mean().backward()
    with pytest.raises(UnsupportedError, match=r"Adafactor .* parameters of one dim"):
        torch.optim.Adafactor(model.parameters()).step()
    torch.optim.LBFGS(model.parameters(), lr=0.1).step(lambda: torch.zeros(()))
    module = model.unwrap()
    module(rows(world.rank)).square().mean().backward()
    torch.optim.Adafactor(module.parameters()).step()


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"use_orig_params": False}),
        (2, {"use_orig_params": False, "strategy": ec.Strategy.NO_SHARD}),
    ],
)
def test_a_step_that_needs_shapes_is_refused_where_parameters_are_flat(ranks, options) -> None:
    run_world("threads", partial(step_flattened, options=options), ranks)


def check_stages(world: ec.World) -> None:
    model = ec.Pipeline(layers(), world.group, microbatches=2, loss_fn=nn.functional.mse_loss)
    for name, make in OPTIMIZERS.items():
        optimizer = make(matrices(model))
        model.step(rows(), target=rows(1))
        if name == "LBFGS":
            with pytest.raises(UnsupportedError, match="all parameters of the model"):
                optimizer.step(lambda: torch.zeros(()))
        else:
            optimizer.step()
    stage = next(iter(model.stages.values()))
    del model  # whose stage is a module like any other again
    torch.optim.LBFGS(stage.parameters()).step(lambda: torch.zeros(()))


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_step_over_all_parameters_is_refused_for_stages(kind: str) -> None:
    run_world(kind, check_stages, 2)


def train_by_lbfgs(world: ec.World) -> None:
    model = ec.DDP(nn.Sequential(*layers()), world.group)
    expected = nn.Sequential(*layers())
    for module, ranks in ((model, [world.rank]), (expected, range(world.size))):
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1)

        def closure(
            module: nn.Module = module,
            ranks: Any = ranks,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> Tensor:
            optimizer.zero_grad()
            loss = sum(module(rows(rank)).square().mean() for rank in ranks) / len(ranks)
            loss.backward()
            loss = loss.detach()
            if isinstance(module, ec.DDP):
                world.group.all_reduce(loss, "mean")
            return loss

        optimizer.step(closure)
    for param, plain in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param, plain, rtol=1e-4, atol=1e-6)


def test_a_step_over_all_parameters_is_right_with_ddp() -> None:
    run_world("threads", train_by_lbfgs, 2)
