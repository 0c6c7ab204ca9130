"""Precision, starts and refusals of FSDP; over simulated ranks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.fsdp.policy import FSDPOptions
from tests.fsdp.checking import shard
from tests.fsdp.models import batch, build, loss_of

# --- precision -----------------------------------------------------------------------------------


class Sees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)
        self.register_buffer("shift", torch.zeros(6))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {
            "x": x.dtype,
            "weight": self.layer.weight.dtype,
            "norm": self.norm.weight.dtype,
            "shift": self.shift.dtype,
        }
        return self.layer(self.norm(x.float()).to(self.layer.weight.dtype)) + self.shift


def computes_low(world: World) -> None:
    precision = ec.MixedPrecision(
        compute=torch.bfloat16, buffers=torch.bfloat16, keep=(nn.LayerNorm,)
    )
    model = shard(world, Sees(), units=ec.units.whole(), precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    before = model.layer.weight.detach().clone()
    model(torch.randn(4, 6)).float().square().sum().backward()
    assert model.module.seen == {
        "x": torch.bfloat16,
        "weight": torch.bfloat16,
        "norm": torch.float32,
        "shift": torch.bfloat16,
    }
    assert model.layer.weight.dtype == model.layer.weight.grad.dtype == torch.float32
    optimizer.step()  # smaller than a step of bfloat16
    difference = (model.layer.weight - before).abs().max()
    assert 0 < difference < 2.0**-8


def test_compute_is_low_and_shards_are_not() -> None:
    ec.run(computes_low, 2)


def times_that_arrive(world: World, cast: bool) -> list[float]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def forward(self, time: Tensor) -> Tensor:
            self.seen = time
            return self.layer((time / 1000).unsqueeze(-1).to(self.layer.weight.dtype))

    precision = ec.MixedPrecision(compute=torch.bfloat16, cast_forward_inputs=cast)
    model = shard(world, Model(), units=ec.units.whole(), precision=precision)
    model(time=torch.tensor([999.0, 501.0])).sum().backward()
    assert model.module.seen.dtype == (torch.bfloat16 if cast else torch.float32)
    return model.module.seen.tolist()


@pytest.mark.parametrize(("cast", "times"), [(True, [1000.0, 500.0]), (False, [999.0, 501.0])])
def test_inputs_keep_their_bits_where_they_are_not_cast(cast, times) -> None:
    assert ec.run(times_that_arrive, 2, args=(cast,)) == [times, times]


def reduces_low(world: World) -> tuple[list[torch.dtype], float]:
    seen: list[int] = []
    with ec.events.listen(
        lambda event: (
            seen.append(event.facts.get("nbytes", 0))
            if event.name == "collective.issue" and event.facts["op"] == "reduce_scatter_single"
            else None
        )
    ):
        model = shard(
            world,
            nn.Linear(6, 6, bias=False),
            units=ec.units.whole(),
            precision=ec.MixedPrecision(reduce=torch.bfloat16),
        )
        model(torch.full((1, 6), 1 + 2.0**-12)).sum().backward()
    assert model.weight.grad.dtype == torch.float32
    assert torch.equal(model.weight.grad, torch.ones_like(model.weight.grad))
    return seen, 0.0


def test_gradients_travel_in_the_dtype_of_the_reduction() -> None:
    for seen, _ in ec.run(reduces_low, 2):
        assert set(seen) == {36 * 2}


# --- refusals ------------------------------------------------------------------------------------


def refused(make: Callable[[World], object], world: World) -> None:
    make(world)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda world: shard(world, layout="columns"), "layout is 'columns'"),
        (lambda world: shard(world, strategy="FULL_SHARD"), "strategy is 'FULL_SHARD'"),
        (lambda world: shard(world, init="maybe"), "init is 'maybe'"),
        (lambda world: shard(world, reduction=0), "reduction is 0"),
        (lambda world: shard(world, min_num_params=-1), "min_num_params is -1"),
        (lambda world: shard(world, precision=torch.bfloat16), "precision is"),
        (lambda world: ec.MixedPrecision(compute=torch.int8), "MixedPrecision compute"),
        (lambda world: shard(world, units="blocks"), "units is 'blocks'"),
        (lambda world: shard(world, "model"), "give a torch.nn.Module"),
        (lambda world: ec.FSDP(build(), world), "give a Group"),
        (lambda world: shard(world, ignored=[nn.Linear(1, 1)]), "not in the model"),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(make, words) -> None:
    with pytest.raises(ArgumentError, match=words):
        ec.run(lambda world: refused(make, world), 2)


def test_a_parameter_shared_with_an_ignored_module_is_named() -> None:
    def main(world: World) -> None:
        model = build()
        shard(world, model, ignored=[model.head])

    with pytest.raises(
        ArgumentError, match="'weight' of module 'tokens' is shared with an ignored"
    ):
        ec.run(main, 2)


def ignores(world: World) -> None:
    model = build()
    fsdp = shard(world, model, ignored=[model.blocks[1]])
    assert fsdp.blocks[1].up.weight.shape == (8, 6)
    loss_of(fsdp, *batch(0, world.rank)).backward()
    local = build()
    loss_of(local, *batch(0, world.rank)).backward()
    # Its gradient is local, and does not know of the others.
    torch.testing.assert_close(
        fsdp.blocks[1].up.weight.grad, local.blocks[1].up.weight.grad, rtol=1e-11, atol=1e-12
    )


def test_ignored_modules_stay_whole_and_local() -> None:
    ec.run(ignores, 2)


def trusts(world: World, init: str) -> None:
    model = shard(world, build(seed=world.rank), init=init)
    state = model.state_dict()["head.weight"]
    same = torch.equal(state, build(seed=0).state_dict()["head.weight"])
    assert same == (init == "broadcast")


@pytest.mark.parametrize("init", ["broadcast", "trust"])
def test_weights_are_those_of_rank_0_or_each_ranks_own(init) -> None:
    ec.run(trusts, 2, args=(init,))


def test_every_strategy_has_its_row() -> None:
    traits = {
        strategy: FSDPOptions(
            strategy=strategy, layout="flat", min_num_params=0, init="trust", reduction="mean"
        ).traits
        for strategy in ec.Strategy
    }
    sharded = {strategy for strategy, row in traits.items() if row.shards}
    assert sharded == {*ec.Strategy} - {ec.Strategy.NO_SHARD}
    for strategy, row in traits.items():
        assert strategy.hybrid is row.hybrid
        assert strategy.regathers is row.reshards_after_forward
