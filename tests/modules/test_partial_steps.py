"""Optimizers that look beyond single elements are refused where a rank has parts or stages."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import UnsupportedError
from echelon.modules import partial_steps
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
    text = rf"a step of {name} looks at (whole tensors|all parameters).*FSDP shards parameters"
    with pytest.raises(UnsupportedError, match=text):
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


class Centralised(torch.optim.SGD):
    """May look at the mean of a gradient, as its groups, it itself or what it has loaded say."""

    is_on, clip = False, None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            needs_mean = self.is_on or self.clip or group["weight_decay"] or group["maximize"]
            for param in group["params"]:
                grad = param.grad - param.grad.mean() if needs_mean else param.grad
                param.sub_(grad, alpha=group["lr"])


def turn_on_by_a_load(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    state["param_groups"][0]["maximize"] = True
    optimizer.load_state_dict(state)


TURNED_ON: dict[str, Any] = {
    "group": lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.1),
    "flag": lambda optimizer: setattr(optimizer, "is_on", True),
    "number": lambda optimizer: setattr(optimizer, "clip", 0.5),
    "load": turn_on_by_a_load,
}


def step_before_and_after(world: ec.World, way: str) -> None:
    model = ec.FSDP(nn.Sequential(*layers()), world.group, min_num_params=0)
    model(rows(world.rank)).square().mean().backward()
    optimizer = Centralised(model.parameters(), lr=0.1)
    optimizer.step()
    TURNED_ON[way](optimizer)
    with pytest.raises(UnsupportedError, match="looks at whole tensors"):
        optimizer.step()


@pytest.mark.parametrize("way", TURNED_ON)
def test_an_optimizer_whose_options_change_is_tried_again(way: str) -> None:
    run_world("threads", partial(step_before_and_after, way=way), 2)


def step_by_a_schedule(world: ec.World) -> None:
    model = ec.FSDP(nn.Sequential(*layers()), world.group, min_num_params=0)
    model(rows(world.rank)).square().mean().backward()
    optimizer = Centralised(model.parameters(), lr=0.1)
    for lr in (0.0, 0.1, 0.05, 1, 0.0, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()


def test_a_schedule_of_rates_is_tried_for_zero_and_for_others(monkeypatch) -> None:
    trials: list[Any] = []
    monkeypatch.setattr(partial_steps, "why_parts_differ", lambda *args: trials.append(args))
    run_world("threads", step_by_a_schedule, 2)
    assert len(trials) == 2 * 2


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
