"""The state of an optimizer is restored with every bit, or not at all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.errors import ArgumentError, StateError, UnsupportedError
from tests.checkpoint.whole import check_equal


def stepped(optimizer: Any, dtype: torch.dtype, steps: int = 3) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2).to(dtype)
    made = optimizer(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        made.step()
    return model, made


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.ASGD])
def test_numbers_of_an_optimizer_keep_their_dtype(optimizer: Any, tmp_path: Path) -> None:
    model, first = stepped(optimizer, torch.bfloat16)
    ec.save(tmp_path, step=3, model=model, optimizer=first)
    model, second = stepped(optimizer, torch.bfloat16, steps=1)
    ec.load(tmp_path, model=model, optimizer=second)
    check_equal(second.state_dict()["state"], first.state_dict()["state"])


def test_numbers_that_are_tensors_inside_of_options_are_saved(tmp_path: Path) -> None:
    betas = torch.tensor(0.8), torch.tensor(0.9, dtype=torch.float64)
    kept = {"rates": [torch.tensor(2**40), {"on": torch.tensor(True)}], "one": torch.tensor(1)}

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, betas=betas, foreach=False)

    model, first = stepped(adam, torch.float32)
    first.param_groups[0]["kept"] = kept
    ec.save(tmp_path, step=3, model=model, optimizer=first)
    model, second = stepped(torch.optim.AdamW, torch.float32, steps=1)
    ec.load(tmp_path, model=model, optimizer=second)
    check_equal(second.param_groups[0]["betas"], betas)
    check_equal(second.param_groups[0]["kept"], kept)
    second.param_groups[0]["kept"] = [torch.ones(2)]
    with pytest.raises(ArgumentError, match=r"kept is or holds a tensor with dims"):
        ec.save(tmp_path, step=4, model=model, optimizer=second)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda o: o.param_groups[0]["params"].pop(), r"a state of a parameter of shape \(2,\)"),
        (lambda o: o.state.update(seen=3), "a state of 'seen' that is in none of its groups"),
        (lambda o: o.state.update({o.param_groups[0]["params"][0]: [1]}), r"keeps \[1\] as the"),
        (lambda o: o.state[o.param_groups[0]["params"][0]].update({0: 1}), "keys are names"),
    ],
)
@pytest.mark.parametrize("call", ["save", "load"])
def test_a_state_that_is_no_parameter_s_or_has_no_names_is_refused(
    call: str, spoil: Any, message: str, tmp_path: Path
) -> None:
    model, optimizer = stepped(torch.optim.Adam, torch.float32)
    ec.save(tmp_path, step=3, model=model, optimizer=optimizer)
    spoil(optimizer)
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        if call == "save":
            ec.save(tmp_path, step=4, model=model, optimizer=optimizer)
        else:
            ec.load(tmp_path, model=model, optimizer=optimizer)
    assert ec.steps(tmp_path) == [3]


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = stepped(torch.optim.Adam, torch.float32)
    values = torch.arange(3)
    with torch.device("meta"):
        ec.save(tmp_path, step=3, model=model, optimizer=optimizer, values=values)
        loaded = ec.load(tmp_path, model=model, optimizer=optimizer)
    check_equal(loaded.values["values"], values)


# What a state_dict() has beside states and groups ---------------------------------------------


class WithHistory(torch.optim.SGD):
    """Its rate falls with a history, which its ``state_dict()`` has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.5)
        self.history: list[float] = []

    def step(self, closure: Any = None) -> None:
        self.history.append(0.5 / (1 + len(self.history)))
        self.param_groups[0]["lr"] = self.history[-1]
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "history": list(self.history)}

    def load_state_dict(self, state: Any) -> None:
        self.history = list(state["history"])
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class SlowWeights(WithHistory):
    """Its ``state_dict()`` has tensors that belong to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": [torch.ones(2)]}


class Wraps(torch.optim.Optimizer):
    """Steps another optimizer, whose states are not its own."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.AdamW(params)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


class Raises(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("consolidate it first")


def trained_on(world: ec.World, wrap: Any, folder: Path, steps: range, *, saves: bool) -> Any:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double(), world)
    optimizer = WithHistory(model.parameters())
    if steps.start:
        ec.load(folder, model=model, optimizer=optimizer)
    for step in steps:
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model(x[world.rank :: world.size]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if saves:
        ec.save(folder, step=steps.stop, model=model, optimizer=optimizer)
    return optimizer.history, {k: v.clone() for k, v in model.state_dict().items()}


WRAPS = {
    "DDP": lambda model, world: ec.DDP(model, world.group),
    "FSDP": lambda model, world: ec.FSDP(model, world.group, min_num_params=0),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))
def test_what_else_a_state_dict_has_is_saved_and_loaded(wrap: Any, tmp_path: Path) -> None:
    straight = ec.run(partial(trained_on, saves=False), 2, args=(wrap, tmp_path, range(6)))
    ec.run(partial(trained_on, saves=True), 2, args=(wrap, tmp_path, range(3)))
    resumed = ec.run(partial(trained_on, saves=False), 2, args=(wrap, tmp_path, range(3, 6)))
    for (history, weights), (expected_history, expected) in zip(resumed, straight, strict=True):
        assert history == expected_history
        check_equal(weights, expected)


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (SlowWeights, r"SlowWeights\.state_dict\(\) has tensors under 'slow'"),
        (Wraps, r"Wraps\.state_dict\(\) has states of 2 parameters, .* those of 0"),
        (lambda params: Raises(params, 0.1), r"Raises\.state_dict\(\) raises RuntimeError"),
    ],
)
def test_what_would_be_lost_is_refused_before_anything_is_written(
    optimizer: Any, sentence: str, tmp_path: Path
) -> None:
    model, made = stepped(optimizer, torch.float32, steps=1)
    with pytest.raises(UnsupportedError, match=sentence):
        ec.save(tmp_path, step=1, model=model, optimizer=made)
    assert ec.steps(tmp_path) == []


def dealt_out(world: ec.World, folder: Path) -> None:
    model = ec.DDP(nn.Linear(2, 2), world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    param = list(model.parameters())[world.rank]
    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    ec.save(folder, step=1, model=model, optimizer=optimizer)


def test_states_that_are_dealt_out_among_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="do not keep the same states: rank 0 has none of 'model/"):
        ec.run(dealt_out, 2, args=(tmp_path,))


# Of a pipeline with a rank that has nothing to train ------------------------------------------


def frozen_below() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    model[:2].requires_grad_(False)
    return model


def in_stages(world: ec.World, text: str, cost: list[int]) -> tuple[Any, torch.optim.Optimizer]:
    """With an optimizer that has a state of every parameter as soon as it is made."""
    stages = ec.pipeline.split(frozen_below(), 2, cost=cost)
    plan = ec.Plan.parse(text, microbatches=2)
    pipe = ec.parallelize(stages, plan, world, loss_fn=nn.functional.mse_loss)
    return pipe, torch.optim.Adagrad(p for p in pipe.parameters() if p.requires_grad)


def saved_and_loaded(world: ec.World, text: str, save: Any, folder: Path) -> Any:
    pipe, optimizer = in_stages(world, text, [1, 1, 1, 1])
    pipe.step(torch.ones(4, 3), target=torch.zeros(4, 3))
    optimizer.step()
    save(folder, step=1, model=pipe, optimizer=optimizer)
    expected = pipe.optimizer_state_dict(optimizer)
    for cost in ([1, 1, 1, 1], [1, 1, 1, 3]):  # with nothing to train on a rank, and without
        pipe, optimizer = in_stages(world, text, cost)
        ec.load(folder, model=pipe, optimizer=optimizer)
        check_equal(pipe.optimizer_state_dict(optimizer), expected)
        pipe.load_optimizer_state_dict(optimizer, expected)
    return expected["state"]


def saved_in_the_background(*args: Any, **items: Any) -> None:
    ec.async_save(*args, **items).wait()


@pytest.mark.parametrize(
    ("text", "save"),
    [
        ("pp=2", ec.save),
        ("pp=2", saved_in_the_background),
        ("pp=2,dp=2", ec.save),
        ("pp=2,shard=2", ec.save),
    ],
)
def test_a_rank_with_nothing_to_train_saves_and_loads_no_state_of_it(
    text: str, save: Any, tmp_path: Path
) -> None:
    ranks = ec.Plan.parse(text, microbatches=2).num_ranks
    expected, *_ = ec.run(saved_and_loaded, ranks, args=(text, save, tmp_path))
    model = frozen_below()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.Adagrad(trained.values())
    ec.load(tmp_path, model=model, optimizer=optimizer)  # is strict: nothing else is in the files
    check_equal({name: optimizer.state[param] for name, param in trained.items()}, expected)


# Into another optimizer, and another dtype ----------------------------------------------------


def test_another_optimizer_keeps_its_own_options_and_takes_no_state(tmp_path: Path) -> None:
    model, first = stepped(torch.optim.AdamW, torch.float32)
    ec.save(tmp_path, step=3, model=model, optimizer=first)
    other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loaded = ec.load(tmp_path, model=model, optimizer=other, strict=False)
    assert other.param_groups[0]["lr"] == 0.5
    assert "betas" not in other.param_groups[0]
    assert not other.state
    assert loaded.differing["optimizer"] == "saved from AdamW, here SGD"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_moments_are_converted_like_their_parameters(dtype: torch.dtype, tmp_path: Path) -> None:
    model, first = stepped(torch.optim.AdamW, torch.float32)
    ec.save(tmp_path, step=3, model=model, optimizer=first)
    model, second = stepped(torch.optim.AdamW, dtype, steps=0)
    ec.load(tmp_path, model=model, optimizer=second, strict=False)
    assert {state["exp_avg"].dtype for state in second.state.values()} == {dtype}
    model(torch.ones(1, 2, dtype=dtype)).sum().backward()
    second.step()
