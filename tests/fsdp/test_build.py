"""Where initial values come from: modules that initialise themselves, and rank 0."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, ModelMismatch, StateError
from echelon.state import initialization
from tests import reference
from tests.fsdp.live import Live
from tests.reference import assert_states_equal
from tests.worlds import KINDS, run_world

VOCABULARY, WIDTH, SEED = 11, 6, 5


class Block(nn.Module):
    """A parameter and buffers of its own; initialises its children, too, which must not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("shift", torch.empty(WIDTH))
        self.register_buffer("rates", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.layer.weight)
        self.scale.normal_() if not self.scale.requires_grad else nn.init.normal_(self.scale)
        self.shift.uniform_()
        self.rates.copy_(torch.arange(WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.layer(self.norm(x)) + self.shift + self.rates)


class Net(nn.Module):
    """Blocks between a tied embedding and a head whose bias is its own; a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.blocks(self.tokens(tokens))))


def build(*, meta: bool = True) -> Net:
    with torch.device("meta") if meta else nullcontext():
        return Net().double()


def everything(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def plain(seed: int = SEED) -> Net:
    """A model in one process whose modules initialise themselves as the documentation says."""
    model = build(meta=False)
    torch.manual_seed(seed)
    base = initialization.draw_seed()
    tied, model.head.weight = model.head.weight, nn.Parameter(model.head.weight.to("meta"))
    for name, module in reversed(list(model.named_modules())):  # children have the last word
        if list(initialization.own_tensors(module)):
            torch.manual_seed(initialization._seed_of(base, name))
            kept = [p.detach().clone() for child in module.children() for p in child.parameters()]
            with torch.no_grad():
                module.reset_parameters()
                for child in module.children():
                    for param in child.parameters():
                        param.copy_(kept.pop(0))
    model.head.weight = tied
    return model


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCABULARY, (2, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
    """Two steps on the batches of these ranks."""

    def losses(step: int) -> list[Tensor]:
        columns = zip(*(batch(step, rank) for rank in ranks), strict=True)
        tokens, targets = (torch.cat(column) for column in columns)
        return [F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())]

    reference.train(optimizer, 2, losses)


def same(model: ec.FSDP, expected: nn.Module) -> None:
    """Bit by bit, with the buffers that no state dict has."""
    with model.full_parameters():
        found, wanted = dict(everything(model.module)), dict(everything(expected))
        assert list(found) == list(wanted)
        assert_states_equal(found, wanted)
        assert model.module.head.weight is model.module.tokens.weight


def shard(world: World, model: nn.Module, **options: Any) -> ec.FSDP:
    options = {"units": ec.units.by_type(Block), "min_num_params": 0, **options}
    return ec.FSDP(model, world.group, **options)


# --- modules initialise themselves ---------------------------------------------------------------


def modules_initialise(world: World) -> None:
    expected = plain()
    for options in (
        {},
        {"units": ec.units.whole(), "layout": "rows"},
        {"units": ec.units.by_type(nn.Linear, nn.LayerNorm), "min_num_params": 20},
        {"units": ec.units.by_type(nn.Embedding, Block), "init": "verify"},
        {"strategy": ec.Strategy.NO_SHARD, "init": "trust"},
    ):
        torch.manual_seed(SEED + world.rank)  # rank 0's counts
        same(shard(world, build(), **options), expected)
        # The caller's stream has gone on by one draw.
        after = torch.rand(3)
        torch.manual_seed(SEED + world.rank)
        initialization.draw_seed()
        assert torch.equal(after, torch.rand(3))
    torch.manual_seed(SEED)
    model = build()
    model = shard(world, model, ignored=[model.blocks[1]])
    assert model.blocks[1].scale.shape == (WIDTH,)
    same(model, expected)
    torch.manual_seed(SEED + 1)
    other = shard(world, build()).state_dict()
    assert not torch.equal(other["tokens.weight"], expected.tokens.weight)


def trains_like_a_plain_model(world: World) -> None:
    torch.manual_seed(SEED)
    model = build()
    params = list(model.parameters())
    model.tokens.weight.note = "stays"
    optimizer = torch.optim.AdamW(params, lr=0.1)  # before there are values
    model = shard(world, model)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert model.tokens.weight.note == "stays"
    assert isinstance(model.tokens.weight, nn.Parameter)
    assert not model.frozen.weight.requires_grad
    train(model, optimizer, [world.rank])
    expected = plain()
    train(expected, torch.optim.AdamW(expected.parameters(), lr=0.1), list(range(world.size)))
    for name, value in model.state_dict().items():
        # The order of sums differs.
        torch.testing.assert_close(
            value, expected.state_dict()[name], rtol=1e-10, atol=1e-11, msg=name
        )


def a_function_initialises(world: World) -> None:
    seen: list[str] = []

    def fill(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for _, tensor in initialization.own_tensors(module):
            assert tensor.is_meta or tensor.device == world.device
            tensor.uniform_()

    states = []
    for rule in (ec.units.whole(), ec.units.by_type(nn.Linear)):
        torch.manual_seed(SEED)
        model = shard(world, build(), units=rule, materialize=fill)
        states.append(model.state_dict())
    owners = 1 + 2 * 3 + 2  # the embedding, two blocks with two children, two layers
    assert len(seen) == 2 * owners
    assert "Net" not in seen  # it owns nothing itself
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert 0 <= states[0]["blocks.0.norm.weight"].min() < 0.999  # not the ones of a LayerNorm
    assert not torch.equal(states[0]["blocks.0.scale"], states[0]["blocks.1.scale"])


# --- rank 0 sends --------------------------------------------------------------------------------


def rank_0_sends(world: World) -> None:
    for options in ({}, {"units": ec.units.whole(), "layout": "rows"}):
        torch.manual_seed(SEED + world.rank)
        model = shard(world, build(meta=world.rank != 0), **options)
        torch.manual_seed(SEED)
        expected = build(meta=False)
        same(model, expected)
    # What rank 0 does not have either comes from the modules.
    torch.manual_seed(SEED)
    model = build(meta=world.rank != 0)
    model.blocks = build().blocks
    model.blocks[0].layer = build(meta=world.rank != 0).frozen
    first = model.blocks[0].layer
    if world.rank == 0:
        nn.init.constant_(first.weight, 3.0)
    state = shard(world, model).state_dict()
    assert torch.equal(state["tokens.weight"], expected.tokens.weight)
    assert torch.equal(state["blocks.0.layer.weight"], torch.full((WIDTH, WIDTH), 3.0).double())
    assert torch.equal(state["blocks.1.norm.weight"], torch.ones(WIDTH).double())
    assert state["blocks.1.layer.weight"].abs().max() <= WIDTH**-0.5  # of nn.Linear
    assert (
        world.group.all_gather_object(state["blocks.1.scale"].tolist())
        == [state["blocks.1.scale"].tolist()] * world.size
    )


class Doubles(nn.Module):
    """Makes its values of a buffer, and then writes into that."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(3, device="meta"))
        self.register_buffer("table", table)

    def reset_parameters(self) -> None:
        self.w.copy_(2 * self.table)
        self.table.zero_()


def a_buffer_comes_before_what_is_made_of_it(world: World) -> None:
    table = torch.tensor([1.0, 2.0, 3.0])
    for others in ("meta", "cpu"):
        mine = table.clone() if world.rank == 0 else torch.full((3,), 9.0).to(others)
        state = shard(world, Doubles(mine), units=ec.units.whole()).state_dict()
        assert torch.equal(state["w"], 2 * table)
        assert torch.equal(state["table"], table)


# --- refusals ------------------------------------------------------------------------------------


class Bare(nn.Module):
    """Has values, and no way to make them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2))


def puts_another(module: nn.Module) -> None:
    for local in list(module._parameters):
        setattr(module, local, nn.Parameter(torch.ones(1)))


def refusals(world: World) -> None:
    first = world.rank == 0

    def bare() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(2, 2), Bare())

    def watched() -> nn.Module:
        model = build()
        model.watcher = weakref.ref(model.tokens.weight)
        return model

    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(2, device="meta"))

    def sparse() -> nn.Module:
        return nn.Embedding(2, 2, sparse=True, device="meta")

    cases: list[tuple[type[Exception], str, Callable[[], nn.Module], dict[str, Any]]] = [
        (ArgumentError, r"'1\.table' .* module '1' \(Bare\) has no reset_param", bare, {}),
        (ArgumentError, "materialize is 3; give a function", build, {"materialize": 3}),
        (ArgumentError, "module 'tokens' put another .* 'weight'", build,
         {"materialize": puts_another}),
        (StateError, r"'tokens\.weight' is on meta and cannot be given", watched, {}),
        (ArgumentError, "has no shape yet", lazy, {}),
        (ArgumentError, "makes sparse gradients, and ranks exchange dense ones", sparse, {}),
        (ModelMismatch, "option 'materialize'", build,
         {"materialize": puts_another if first else None}),
        (ModelMismatch, r"device of 'tokens\.weight', and init='broadcast' takes rank 0's values",
         lambda: build(meta=first), {}),
        (ModelMismatch, r"device of 'tokens\.weight', and init='trust' takes the values of every",
         lambda: build(meta=not first), {"init": "trust"}),
        (ModelMismatch, r"values of parameter 'tokens\.weight'(.|\n)*none, it is on the meta",
         lambda: build(meta=not first), {"init": "verify"}),
    ]  # fmt: skip
    for kind, words, make, options in cases:
        with pytest.raises(kind, match=words):
            shard(world, make(), units=ec.units.whole(), **options)
    with pytest.raises(ArgumentError, match=r"'tokens\.weight' is on meta and the group is on"):
        ec.DDP(build(), world.group)


# --- memory --------------------------------------------------------------------------------------


LAYERS, SIDE = 8, 32
UNIT = (SIDE + 1) * SIDE * 4


def tower(*, meta: bool) -> nn.Module:
    """Of frozen weights, so that the slots of gradients are small beside a unit."""
    with torch.device("meta") if meta else nullcontext():
        model = nn.Sequential(*[nn.Linear(SIDE, SIDE) for _ in range(LAYERS)])
    for layer in model:
        layer.weight.requires_grad_(False)
    return model


def weigh(world: World, meta: bool) -> None:
    with Live() as live:
        module = tower(meta=meta or world.rank != 0)
        before = live.now()
        model = ec.FSDP(module, world.group, units=ec.units.by_type(nn.Linear), min_num_params=0)
        after = live.now()
    stats = model.memory_stats()
    assert before == (0 if meta or world.rank else LAYERS * UNIT)
    assert stats.slots < UNIT
    slack = 512  # bytes of what is not a parameter, such as the base seed
    kept = stats.slots + slack + (0 if world.group.shares_memory else stats.shards)
    if world.group.shares_memory:  # in a world of threads one rank or another has made it
        assert sum(world.group.all_gather_object(after)) <= LAYERS * UNIT + world.size * kept
    else:
        assert after <= kept
    if before == 0:
        assert live.peak <= after + UNIT
    else:
        # The memory of each unit is free before the next is there.
        part = 0 if world.group.shares_memory else UNIT // world.size
        assert live.peak <= before + UNIT + part + slack


# --- the worlds ----------------------------------------------------------------------------------


def all_checks(world: World) -> None:
    modules_initialise(world)
    trains_like_a_plain_model(world)
    a_function_initialises(world)
    rank_0_sends(world)
    a_buffer_comes_before_what_is_made_of_it(world)
    refusals(world)
    weigh(world, True)
    weigh(world, False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_values_come_from_modules_or_from_rank_0(kind) -> None:
    run_world(kind, all_checks, 3)


def test_one_rank_starts_with_the_same_values_and_never_holds_the_model_twice() -> None:
    def main(world: World) -> None:
        modules_initialise(world)
        a_function_initialises(world)
        weigh(world, True)
        weigh(world, False)

    ec.run(main, 1)
