"""Laws of FSDP: *Same bits*, *Counts*, *Memory*, and *Parity* when ranks are late anywhere."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.fsdp.gradients import Reduction
from echelon.fsdp.unit import Unit
from tests import reference
from tests.fsdp.models import PLAIN, Block, batch, build, has_effect, loss_of, train_plain
from tests.reference import assert_states_close, assert_states_equal
from tests.worlds import events_of, run_world

BLOCKS = ec.units.by_type(Block)
STEPS = 2


def train(
    world: World, steps: int = STEPS, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    model = ec.FSDP(build(), world.group, units=BLOCKS, min_num_params=0, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def losses(step: int) -> Iterator[Tensor]:
        yield loss_of(model, *batch(step, world.rank))
        late("optimizer")

    totals = reference.train(optimizer, steps, losses)
    return model.state_dict(), totals


# --- delays --------------------------------------------------------------------------------------

_chance: random.Random | None = None


def late(where: str) -> None:
    """Sometimes sleep, where the test asked for it."""
    if _chance is not None and _chance.random() < 0.5:
        time.sleep(0.004 * _chance.random())


def train_late(world: World, every: int) -> list[dict[str, Tensor]]:
    """A rank is late before gathers, reductions and the optimizer; each rank elsewhere."""
    global _chance
    _chance = random.Random(world.rank)
    gather, start = Unit.unshard, Reduction.start

    def late_gather(unit: Unit) -> None:
        late("gather")
        gather(unit)

    def late_start(reduction: Reduction, gradients: Any) -> None:
        late("reduction")
        start(reduction, gradients)

    Unit.unshard, Reduction.start = late_gather, late_start  # in a process of its own
    return train_every(world, every)


LOW = ec.MixedPrecision(compute=torch.float32, reduce=torch.float32, buffers=torch.float32)
EVERY = [
    {"strategy": strategy, "layout": layout, "precision": precision}
    for strategy in PLAIN
    for layout in ("flat", "rows")
    for precision in (None, LOW)
    if has_effect(strategy, layout)
]


def train_every(world: World, every: int = 1) -> list[dict[str, Tensor]]:
    return [train(world, **options)[0] for options in EVERY[::every]]


@pytest.fixture(scope="module")
def in_time() -> list[dict[str, Tensor]]:
    return ec.run(train_every, 3)[0]


@pytest.mark.slow_for("processes", "gloo")
@pytest.mark.parametrize(("kind", "every"), [("processes", 1), ("gloo", 3)])
def test_late_ranks_change_nothing(kind, every, in_time) -> None:
    plain, _ = train_plain(3, STEPS)
    for states in run_world(kind, train_late, 3, (every,)):
        for options, state, expected in zip(EVERY[::every], states, in_time[::every], strict=True):
            if options["precision"] is None:
                assert_states_close(state, plain, rtol=1e-11, atol=1e-12)
            assert_states_equal(state, expected)  # as without delays, in another world


# --- same bits -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_two_runs_and_all_ranks_have_the_same_bits(kind) -> None:
    first, second = (run_world(kind, train, 3) for _ in range(2))
    states = [state for state, _ in (*first, *second)]
    for state in states[1:]:
        assert_states_equal(state, states[0])
    assert [losses for _, losses in first] == [losses for _, losses in second]


# --- counts --------------------------------------------------------------------------------------


def trainable_numel(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad)


def count(world: World, strategy: ec.Strategy) -> tuple[Counter[str], Counter[str]]:
    """Collectives and bytes of the third step."""
    model = ec.FSDP(build(), world.group, units=BLOCKS, min_num_params=0, strategy=strategy)
    for step in range(3):
        model.zero_grad()
        with events_of(world.rank, "collective.issue") as events:
            loss_of(model, *batch(step, world.rank)).backward()
    calls: Counter[str] = Counter(event.facts["op"] for event in events)
    nbytes: Counter[str] = Counter()
    for event in events:
        nbytes[event.facts["op"]] += event.facts["nbytes"]
    return calls, nbytes


# The first block is used twice in a forward, and gathered twice for it.
FORWARD = 1 + 3 + 1
GATHERS = {
    ec.Strategy.FULL_SHARD: FORWARD + 3,
    ec.Strategy.SHARD_GRAD_OP: 1 + 3,
    ec.Strategy.SHARD_OPTIMIZER: 1 + 3,
    ec.Strategy.NO_SHARD: 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", PLAIN)
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_collectives_and_bytes_of_a_step(kind, strategy) -> None:
    plain = build()
    blocks = sum(p.numel() for p in plain.blocks.parameters()) * 8
    trainable = sum(p.numel() for p in plain.parameters() if p.requires_grad) * 8
    # Where memory is not shared, both ranks send parts of one length.
    of_block = trainable_numel(plain.blocks[0])
    padding = (of_block % 2 * 3 + (trainable // 8 - 3 * of_block) % 2) * 8
    for calls, nbytes in run_world(kind, count, 2, (strategy,)):
        reduced = "all_reduce" if strategy is ec.Strategy.NO_SHARD else "reduce_scatter_single"
        flags = 1  # which parameters were used
        assert calls[reduced] == 4 + (flags if reduced == "all_reduce" else 0)
        num_flags = sum(1 for p in plain.parameters() if p.requires_grad) + 1  # is one frozen now?
        more = num_flags if reduced == "all_reduce" else padding if kind == "gloo" else 0
        assert nbytes[reduced] == trainable + more
        if kind == "gloo":
            # Frozen and trainable parameters of the root are two storages.
            gathers = GATHERS[strategy]
            assert calls["all_gather_single"] == gathers + (1 if gathers else 0)
            assert calls["barrier"] == 0
        else:
            assert calls["all_gather_single"] == 0  # the memory is everyone's
            assert calls["barrier"] == 1
    assert blocks < trainable


# --- memory --------------------------------------------------------------------------------------


def weigh(world: World) -> tuple[int, int, int]:
    """The largest number of bytes of whole units alive, of one unit, and of the model."""
    layers = 12
    model = ec.FSDP(
        nn.Sequential(*[nn.Linear(32, 32) for _ in range(layers)]),
        world.group,
        units=ec.units.by_type(nn.Linear),
    )
    with events_of(world.rank) as events:
        model(torch.randn(2, 32)).sum().backward()
    alive, peak = 0, 0
    for event in events:
        if event.name.startswith("fsdp."):
            sign = 1 if event.name == "fsdp.gather" else -1
            alive += sign * event.facts["nbytes"]
            peak = max(peak, alive)
    assert alive == 0
    stats = model.memory_stats()
    assert stats.gathered == 0
    assert stats.slots == (2 * 1056 * 4 if world.group.shares_memory else 0)
    return peak, 1056 * 4, layers * 1056 * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_at_most_two_units_are_whole_at_once(kind) -> None:
    for peak, unit, model in run_world(kind, weigh, 2):
        assert unit <= peak <= 2 * unit < model


# --- many ranks ----------------------------------------------------------------------------------


def train_many(world: World) -> dict[str, Tensor]:
    return train(world, steps=1 if world.size == 64 else 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 64])
def test_parity_on_many_simulated_ranks(ranks) -> None:
    expected, _ = train_plain(ranks, 1 if ranks == 64 else 2)
    state = ec.run(train_many, ranks)[-1]
    assert_states_close(state, expected, rtol=1e-10, atol=1e-11)
