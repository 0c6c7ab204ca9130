"""Dtypes of shards, of gradients on their way, and of what they accumulate in."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from tests.fsdp.checking import shard
from tests.reference import assert_states_close, rows, train_on
from tests.worlds import run_world

LOW = (torch.float16, torch.bfloat16)
# Of these, four make up one step of the dtype at 1, and each alone is lost beside 1.
SMALL = {torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}


class Line(nn.Module):
    """The gradient of its weight is its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1, 8, dtype=dtype))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.dtype)
        return (self.weight * x.to(self.weight.dtype)).sum()


def line(world: World, dtype: torch.dtype, **options: Any) -> ec.FSDP:
    precision = ec.MixedPrecision(**options.pop("precision", {}))
    return shard(world, Line(dtype), units=ec.units.whole(), precision=precision, **options)


def whole_values(world: World, model: ec.FSDP) -> list[float]:
    return [
        v
        for part in world.group.all_gather_object(ec.local_shard(model.weight).tolist())
        for v in part
    ]


# --- master --------------------------------------------------------------------------------------


def keeps_bits(world: World, built: torch.dtype, precision: dict[str, Any], low: torch.dtype):
    for layout in ("flat", "rows"):
        model = line(world, built, precision=precision, layout=layout)
        optimizer = torch.optim.Adam(model.parameters(), lr=2.0**-13)
        assert model.weight.dtype == torch.float32
        for _ in range(2):
            model(torch.full((7,), float(world.rank + 1))).backward()
            assert model.weight.grad.dtype == torch.float32
            optimizer.step()
        assert model.seen == [low] * 2
        moments = optimizer.state[model.weight]["exp_avg"]
        assert moments.dtype == torch.float32
        state = model.state_dict()["weight"]
        assert state.dtype == torch.float32
        assert state.tolist() == whole_values(world, model)
        assert not torch.equal(state, state.to(low).float())
        model.load_state_dict({"weight": state + 2.0**-15})
        assert torch.equal(model.state_dict()["weight"], state + 2.0**-15)


def keeps_bits_of_both(world: World) -> None:
    for low in LOW:
        keeps_bits(world, low, {"master": torch.float32}, low)
        keeps_bits(world, torch.float32, {"compute": low}, low)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_shards_and_saved_states_keep_bits_that_the_compute_dtype_has_not(kind) -> None:
    run_world(kind, keeps_bits_of_both, 2)


def keeps_whole(world: World) -> None:
    model = line(world, torch.bfloat16, precision={"master": torch.float32}, min_num_params=99)
    assert model.weight.dtype == torch.float32
    with torch.no_grad():
        model.weight.add_(2.0**-13)
    assert torch.equal(model.state_dict()["weight"], torch.arange(1.0, 8.0) + 2.0**-13)
    model(torch.ones(7)).backward()
    assert model.seen == [torch.bfloat16]
    assert model.weight.grad.dtype == torch.float32


def test_the_master_dtype_is_that_of_small_units_too() -> None:
    ec.run(keeps_whole, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": torch.int8}, "MixedPrecision master"),
        ({"master": torch.float16, "compute": torch.float32}, "would lose bits"),
        ({"keep_low_precision_grads": 1}, "MixedPrecision keep_low_precision_grads is 1"),
        ({"cast_forward_inputs": None}, "MixedPrecision cast_forward_inputs is None"),
    ],
)
def test_precisions_that_contradict_themselves_are_refused(options, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        ec.MixedPrecision(**options)


# --- gradients -----------------------------------------------------------------------------------


def backwards(model: ec.FSDP, way: str, small: float) -> None:
    """The gradient 1, and four small ones."""
    values = [1.0] + [small] * 4
    for i, value in enumerate(values):
        loss = model(torch.full((7,), value))
        if way == "shards" or i == len(values) - 1:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()


def accumulates(world: World) -> None:
    for low in LOW:
        small = SMALL[low]
        wide = 1 + 4 * small
        for way in ("shards", "no_sync"):
            for keep in (False, True):
                cases = [
                    ({"reduce": torch.float32}, low, wide, torch.float32),
                    ({"reduce": torch.float32, "compute": low}, torch.float32, wide, torch.float32),
                    ({"reduce": low, "compute": low}, torch.float32, 1.0, low),
                    ({"reduce": low, "master": torch.float32}, low, 1.0, low),
                    ({"reduce": low}, torch.float32, 1.0, low),
                ]
                for precision, built, expected, reduced in cases:
                    options = {**precision, "keep_low_precision_grads": keep}
                    model = line(world, built, precision=options)
                    backwards(model, way, small)
                    grad = model.weight.grad
                    assert grad.dtype == (reduced if keep else model.weight.dtype)
                    assert torch.equal(grad, torch.full_like(grad, expected)), (options, way)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_gradients_accumulate_in_the_dtype_of_the_reduction(kind) -> None:
    run_world(kind, accumulates, 2)


def overwrites(world: World) -> None:
    """The sum behind a rounded gradient gives way to what the user wrote."""
    for reduce in (torch.float32, torch.bfloat16):
        model = line(world, torch.bfloat16, precision={"reduce": reduce})
        model.weight.grad = torch.full_like(model.weight, 2.0)  # before any backward
        model(torch.ones(7)).backward()
        assert torch.equal(model.weight.grad, torch.full_like(model.weight.grad, 3.0))
    model = line(world, torch.bfloat16, precision={"reduce": torch.float32})
    model(torch.full((7,), 1 + 2.0**-7)).backward()
    with torch.no_grad():
        model.weight.grad.mul_(2)
    model(torch.ones(7)).backward()
    assert torch.equal(model.weight.grad, torch.full_like(model.weight.grad, 3 + 2.0**-6))
    model.zero_grad(set_to_none=False)
    model(torch.ones(7)).backward()
    assert torch.equal(model.weight.grad, torch.ones_like(model.weight.grad))
    model.weight.grad = torch.full_like(model.weight, 5.0)
    model(torch.ones(7)).backward()
    assert torch.equal(model.weight.grad, torch.full_like(model.weight.grad, 6.0))
    model.zero_grad()
    model(torch.ones(7)).backward()
    assert torch.equal(model.weight.grad, torch.ones_like(model.weight.grad))


def test_what_the_user_writes_into_a_gradient_is_what_counts() -> None:
    ec.run(overwrites, 2)


# --- nothing to reduce ---------------------------------------------------------------------------


class RowsOfNothing(nn.Module):
    """Has a parameter of three rows, in which there are no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1, 8, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(3, 0, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).square() + self.empty.sum()


def trains_rows_of_nothing(world: World, layout: str) -> None:
    states = []
    wrapped = shard(world, RowsOfNothing(), units=ec.units.whole(), layout=layout)
    for model, ranks in ((RowsOfNothing(), range(world.size)), (wrapped, [world.rank])):

        def loss_of(step: int, rank: int, model: nn.Module = model) -> Tensor:
            return model(rows(rank, 2, 7, step=step)).mean()

        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        states.append(train_on(ranks, model, optimizer, 3, loss_of))
    assert_states_close(states[1], states[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_parameter_of_rows_without_elements_trains_as_in_one_process(kind, layout) -> None:
    run_world(kind, trains_rows_of_nothing, 2, args=(layout,))


KINDS: list[dict[str, Any]] = [
    *({"strategy": strategy} for strategy in ec.Strategy if "HYBRID" not in strategy.name),
    {"layout": "rows"},
    {"layout": "flat", "use_orig_params": False},
    {"precision": ec.MixedPrecision(compute=torch.bfloat16)},
    {"precision": ec.MixedPrecision(compute=torch.bfloat16, reduce=torch.float64)},
]


def zeroed_by_hand(wrap: Callable[[nn.Module], nn.Module]) -> Tensor:
    """The weight after steps in which gradients are detached and zeroed as in old code."""
    model = wrap(nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        for param in model.parameters():
            if param.grad is not None:
                param.grad.detach_().zero_()
                (param.grad * 2).detach_()
        for _ in range(1 + step % 2):  # one reduced gradient is added to another
            model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    return next(iter(model.state_dict().values())).clone()


def detaches_in_place(world: World) -> None:
    expected = zeroed_by_hand(lambda model: model)
    ddp = zeroed_by_hand(lambda model: ec.DDP(model, world.group))
    torch.testing.assert_close(ddp, expected)
    for options in KINDS:
        found = zeroed_by_hand(partial(shard, world, units=ec.units.whole(), **options))
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_gradients_can_be_detached_in_place_as_in_one_process(kind: str) -> None:
    for ranks in (1, 2):
        run_world(kind, detaches_in_place, ranks)
