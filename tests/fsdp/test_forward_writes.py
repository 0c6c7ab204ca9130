"""A forward that writes into its parameters is right or refused; what only looks so is no write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import echelon as ec
from tests.worlds import run_world

Act = Callable[[nn.Parameter], None]

# What forwards do to a parameter of [8, 4], each through another way to its memory.
WRITES: dict[str, Act] = {
    "mul_": lambda w: w.mul_(2.0),
    "index assignment": lambda w: w.__setitem__(0, 3.0),
    "out=": lambda w: torch.mul(w, 2.0, out=w),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "view": lambda w: w.view(-1)[3:].zero_(),
    "transposed": lambda w: w.t().copy_(torch.ones(4, 8, dtype=w.dtype)),
    "detach": lambda w: w.detach().mul_(2.0),
    "clamp of init": lambda w: nn.init.constant_(w, 2.0),
    "other data": lambda w: setattr(w, "data", w.data * 2),
    "data": lambda w: w.data.mul_(2.0),
    "data of a view": lambda w: w[2:4].data.mul_(2.0),
    "one element of data": lambda w: w.data.view(-1)[-1].fill_(7.0),
    "merged and unmerged": lambda w: (w.data.add_(1.0), w.data.sub_(1.0)),
    "renorm": lambda w: w.data.renorm_(2, 0, 0.1),
    "from storage": lambda w: torch.empty(0, dtype=w.dtype).set_(w.untyped_storage()).mul_(2.0),
    "NumPy": lambda w: w.detach().numpy().__imul__(2.0),
    "memory view": lambda w: memoryview(w.data.numpy()).cast("B").__setitem__(3, 99),
    "DLPack": lambda w: torch.from_dlpack(w.detach()).mul_(2.0),
}
NO_OPERATORS = ("NumPy", "memory view")
# What only looks like a write.
NO_WRITES: dict[str, Act] = {
    "nothing": lambda w: None,
    "set_ of itself": lambda w: w.set_(w),
    "set_ of its alias": lambda w: w.set_(w.data),
    "data exchanged and put back": lambda w: exchanged(w),
    "version of an alias": lambda w: w.data.clone().mul_(2.0),
    "another tensor": lambda w: torch.empty_like(w).copy_(w).mul_(2.0),
    "flags": lambda w: w.requires_grad_(True),
}


def exchanged(w: nn.Parameter) -> None:
    own, w.data = w.data, w.data + 1
    w.data = own


class Acting(nn.Module):
    def __init__(self, act: Act, since: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
        self.act, self.since, self.num_forwards = act, since, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_forwards >= self.since:
            with torch.no_grad():
                self.act(self.weight)
        self.num_forwards += 1
        return x @ self.weight.t()


class Around(nn.Module):
    """Its unit is a part of it."""

    def __init__(self, act: Act, since: int = 0) -> None:
        super().__init__()
        self.inner = Acting(act, since)
        self.head = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {},
    "rows": {"layout": "rows"},
    "ZeRO-2": {"strategy": ec.Strategy.SHARD_GRAD_OP},
    "masters": {"precision": ec.MixedPrecision(compute=torch.float32, master=torch.float64)},
}


def wrapped(world: ec.World, net: nn.Module, name: str) -> ec.FSDP:
    units = None if isinstance(net, Acting) else ec.units.by_type(Acting)
    return ec.FSDP(net, world.group, min_num_params=0, units=units, **OPTIONS[name])


def is_refused(model: ec.FSDP) -> bool:
    try:
        model(torch.ones(2, 4, dtype=torch.float64))
    except ec.StateError as error:
        return "wrote into parameter" in str(error) and "weight'" in str(error)
    return False


def writes_are_refused(world: ec.World, name: str) -> None:
    for make in (Acting, Around):
        for what, act in WRITES.items():
            refused = world.group.all_gather_object(is_refused(wrapped(world, make(act), name)))
            # Another rank may have written the same before this one has looked for the first time.
            assert all(refused) or (what in NO_OPERATORS and any(refused)), (what, refused)


def what_writes_nothing_trains(world: ec.World, name: str) -> None:
    states = []
    for what, act in NO_WRITES.items():
        model = wrapped(world, Around(act), name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = torch.full((2, 4), step + world.rank + 1.0, dtype=torch.float64)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append((what, model.state_dict()))
    (_, expected), *others = states
    for what, state in others:
        assert all(torch.equal(state[key], expected[key]) for key in expected), what


@pytest.mark.parametrize("name", OPTIONS)
def test_a_forward_that_writes_into_its_parameter_is_refused(name):
    run_world("threads", writes_are_refused, 2, (name,))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_forward_that_puts_the_same_memory_back_trains(name):
    run_world("threads", what_writes_nothing_trains, 2, (name,))


def check_all(world: ec.World) -> None:
    for name in OPTIONS:
        writes_are_refused(world, name)
        what_writes_nothing_trains(world, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_a_forward_that_writes_is_refused_over(kind):
    run_world(kind, check_all, 2)


def operators_are_refused_before_they_write(world: ec.World) -> None:
    model = wrapped(world, Acting(WRITES["data"]), "flat")
    before = model.state_dict()
    with pytest.raises(ec.StateError, match="wrote into parameter 'weight'"):
        model(torch.ones(2, 4, dtype=torch.float64))
    world.group.barrier(label="after a refusal")
    assert torch.equal(model.state_dict()["weight"], before["weight"])


def test_an_operator_is_refused_before_it_writes():
    run_world("threads", operators_are_refused_before_they_write, 2)


def late_writes_are_refused(world: ec.World) -> None:
    for since in (1, 2, 20):
        net = Acting(WRITES["data"], since)
        model = wrapped(world, net, "flat")
        with pytest.raises(ec.StateError, match="wrote into parameter 'weight'"):
            for _ in range(32):
                model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        world.group.barrier(label="after a refusal")


def test_a_forward_that_writes_later_through_an_alias_is_refused_in_the_next_one_that_is_watched():
    run_world("threads", late_writes_are_refused, 2)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class Plus(nn.Module):
    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


class Adapted(nn.Module):
    """Registers a parametrization in each forward from ``since`` on, and removes it."""

    def __init__(self, since: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.since, self.num_forwards = since, 0
        self.experts = Experts().requires_grad_(False)
        self.a = nn.Parameter(torch.randn(8, 2, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        if self.num_forwards <= self.since:
            return self.experts(x) + x @ (self.a @ self.b).t()
        parametrize.register_parametrization(self.experts, "weight", Plus(self.a @ self.b))
        try:
            with parametrize.cached():
                return self.experts(x)
        finally:
            parametrize.remove_parametrizations(self.experts, "weight", leave_parametrized=False)


def adapted(world: ec.World | None, since: int, strategy: ec.Strategy) -> dict[str, torch.Tensor]:
    model: nn.Module = Adapted(since)
    rows = slice(None)
    if world is not None:
        rows = slice(world.rank, None, 2)
        options = {} if strategy is ec.Strategy.NO_SHARD else {"min_num_params": 0}
        model = ec.FSDP(model, world.group, strategy=strategy, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(6):
        model(x[rows]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def temporary_parametrizations_train(world: ec.World) -> None:
    for since in (0, 3):
        for strategy in (ec.Strategy.FULL_SHARD, ec.Strategy.NO_SHARD):
            expected, actual = adapted(None, since, strategy), adapted(world, since, strategy)
            assert list(actual) == list(expected)
            for name, value in expected.items():  # sums of halves of the batch
                torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_temporary_parametrization_trains_as_in_one_process(kind):
    run_world(kind, temporary_parametrizations_train, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def compiled_units_stay_compiled(world: ec.World) -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    net = nn.Sequential(Block(), nn.Linear(4, 2))
    net[0].compile(backend=backend, fullgraph=True)
    model = ec.FSDP(net, world.group, min_num_params=0, units=ec.units.by_type(Block))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_unit_stays_compiled_in_forwards_that_are_watched():
    ec.run(compiled_units_stay_compiled, 1, "processes")


def attributes(world: ec.World) -> None:
    model = wrapped(world, Around(NO_WRITES["nothing"]), "flat")
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert not any(vars(param) for param in model.module.parameters())


def test_a_forward_leaves_no_attribute_on_parameters():
    run_world("threads", attributes, 2)


def evaluates_before_a_step(world: ec.World) -> None:
    torch.manual_seed(0)
    model = ec.FSDP(nn.Linear(4, 3), world.group, min_num_params=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 4))
        model.train()
        optimizer.step()  # of a rank that need not wait for the others


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_step_of_another_rank_after_an_evaluation_is_no_write_of_this_one(kind: str):
    run_world(kind, evaluates_before_a_step, 3)
