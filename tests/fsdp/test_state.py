"""State, precision, starts and refusals of FSDP; over simulated ranks."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.errors import ArgumentError, ModelMismatch, StateError
from echelon.world.base import World
from tests.fsdp.checking import plain_grads, same_grads, shard, whole_grads
from tests.fsdp.models import Block, batch, build, loss_of
from tests.worlds import run_world

# --- state ---------------------------------------------------------------------------------------


def saves(world: World, layout: str) -> None:
    model = shard(world, layout=layout)
    expected = build(seed=1).state_dict()
    report = model.load_state_dict(expected)
    assert report == ([], [])
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value)
    model.load_state_dict({**state, "shift": state["shift"] + 1})
    assert torch.equal(model.module.shift, state["shift"] + 1)
    with pytest.raises(ArgumentError, match=r"blocks\.0\.scale: missing; more: unexpected"):
        model.load_state_dict(
            {**{k: v for k, v in state.items() if k != "blocks.0.scale"}, "more": torch.ones(1)}
        )
    with pytest.raises(ArgumentError, match=r"head\.weight: \(2,\) instead of \(11, 6\)"):
        model.load_state_dict({**state, "head.weight": torch.ones(2)})
    assert model.load_state_dict({"more": torch.ones(1)}, strict=False).unexpected_keys == ["more"]
    with pytest.raises(ArgumentError, match="assign"):
        model.load_state_dict(state, assign=True)
    with model.full_parameters():
        assert torch.equal(model.state_dict()["head.weight"], state["head.weight"])
        assert model.head.weight.shape == (11, 6)  # and the block goes on


def refuses_values(world: World) -> None:
    """Nothing is loaded when one value does not fit."""
    model = shard(world)
    before = model.sharded_state_dict()
    ones = {name: torch.ones_like(value) for name, value in build().state_dict().items()}
    for wrong, words in [
        (torch.ones(6, 6, dtype=torch.complex128), "torch.complex128 would lose"),
        ([1.0], "a list instead of a tensor"),
        (torch.ones(6, 7), r"\(6, 7\) instead of \(6, 6\)"),
    ]:
        with pytest.raises(ArgumentError, match=rf"frozen\.weight: {words}"):
            model.load_state_dict({**ones, "frozen.weight": wrong})
    for name, value in model.sharded_state_dict().items():
        assert torch.equal(value, before[name])
    model.load_state_dict({name: value.half() for name, value in ones.items()})
    assert torch.equal(model.state_dict()["blocks.1.scale"], torch.ones(()).double())
    counted = shard(
        world, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), units=ec.units.whole()
    )
    state = counted.state_dict()
    with pytest.raises(ArgumentError, match=r"torch\.float32 would lose what torch\.int64"):
        counted.load_state_dict({**state, "1.num_batches_tracked": torch.tensor(0.5)})


def test_values_that_do_not_fit_are_refused_before_any_is_loaded() -> None:
    ec.run(refuses_values, 2)


# --- parts ---------------------------------------------------------------------------------------


def saves_parts(world: World, layout: str) -> None:
    model = shard(world, layout=layout)
    plain = build(seed=1).state_dict()
    model.load_state_dict(plain)
    state = model.sharded_state_dict()
    assert list(state) == list(plain)
    owned = {info.names for info in model.units}
    for names in owned:
        for name in names:
            info = model.shard_info(name)[world.rank]
            part = plain[name].flatten()[info.start : info.start + info.size]
            assert torch.equal(state[name].flatten(), part)
    assert torch.equal(state["shift"], plain["shift"])
    model.load_state_dict(build(seed=2).state_dict())
    assert not torch.equal(state["shift"] + 1, model.shift)  # copies, not views
    assert model.load_sharded_state_dict(state) == ([], [])
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain[name])
    size = model.frozen.weight.shape
    larger = torch.ones(size[0] + 1, *size[1:])
    ones = {name: torch.ones_like(value) for name, value in state.items()}
    with pytest.raises(ArgumentError) as error:
        model.load_sharded_state_dict({**ones, "frozen.weight": larger})
    assert f"{tuple(larger.shape)} instead of {tuple(size)}" in str(error.value)
    with pytest.raises(ArgumentError, match="more: unexpected"):
        model.load_sharded_state_dict({**ones, "more": torch.ones(1)})
    for name, value in model.sharded_state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_a_rank_saves_and_loads_its_parts(layout) -> None:
    ec.run(saves_parts, 3, args=(layout,))


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.note = nn.Linear(6, 6), "new"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def keeps_extra(world: World) -> None:
    model = shard(world, nn.Sequential(Extra(), nn.Linear(6, 6)), units=ec.units.whole())
    for save, load in [
        (model.state_dict, model.load_state_dict),
        (model.sharded_state_dict, model.load_sharded_state_dict),
    ]:
        model.module[0].note = "saved"
        state = save()
        model.module[0].note = "new"
        load(state)
        assert model.module[0].note == "saved"


def test_extra_state_of_modules_is_loaded() -> None:
    ec.run(keeps_extra, 2)


# --- the whole state on one rank -----------------------------------------------------------------

WIDE = 64


def wide() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(6)))


def tensor_nbytes() -> int:
    """Of all tensors of this process; memory that several show counts once."""
    found = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter):
            storage = one.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def streams(world: World) -> None:
    """Memory of a process is measured, so ranks must not be threads of one."""
    plain = wide().state_dict()
    model = shard(world, wide(), units=ec.units.by_type(nn.Linear))
    unit_nbytes = WIDE * WIDE * 4
    gc.collect()
    before = tensor_nbytes()
    seen: list[int] = []

    def look(event: Any) -> None:
        if event.name in ("fsdp.gather", "fsdp.release"):
            seen.append(tensor_nbytes() - before)

    with ec.events.listen(look):
        state = model.whole_state_dict(rank0_only=True)
    assert len(seen) >= 6
    if world.rank:
        assert state == {}
        assert max(seen) <= unit_nbytes
    else:
        assert max(seen) >= 6 * unit_nbytes
        assert all(torch.equal(state[name], value) for name, value in plain.items())


def saves_on_rank_0(world: World) -> None:
    model, plain = shard(world), build().state_dict()
    for rank0_only in (False, True):
        state = model.whole_state_dict(rank0_only=rank0_only)
        assert list(state) == (list(plain) if world.rank == 0 or not rank0_only else [])
        for name, value in state.items():
            assert torch.equal(value, plain[name])
            assert value.device == torch.device("cpu")
    loss = loss_of(model, *batch(0, world.rank))
    model.state_dict()  # between forward and backward
    loss.backward()
    same_grads(whole_grads(model, world), plain_grads(*(batch(0, r) for r in range(world.size))))
    inside = nn.Sequential(nn.Linear(6, 6))
    wrapped = shard(world, inside, units=ec.units.whole())
    with pytest.raises(StateError, match="inside a forward"):
        inside.register_forward_pre_hook(lambda module, args: wrapped.state_dict())
        wrapped(torch.ones(1, 6))


def test_the_whole_state_goes_to_rank_0_alone() -> None:
    ec.run(saves_on_rank_0, 3)


def keeps_bits(world: World, layout: str) -> None:
    torch.manual_seed(5)
    plain = nn.Linear(6, 6)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    precision = ec.MixedPrecision(compute=torch.bfloat16)
    model = shard(world, plain, units=ec.units.whole(), precision=precision, layout=layout)
    for state in (model.state_dict(), model.whole_state_dict()):
        for name, value in expected.items():
            assert value.dtype == torch.float32
            assert torch.equal(state[name], value)


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_a_saved_state_is_not_rounded_to_the_dtype_of_compute(layout) -> None:
    ec.run(keeps_bits, 2, args=(layout,))


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_the_whole_state_is_saved_and_loaded_with_the_plain_keys(layout) -> None:
    ec.run(saves, 3, args=(layout,))


def opens(world: World) -> None:
    model = shard(world)
    plain = build()
    with model.full_parameters():
        for (name, param), (other, value) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert name == other
            assert torch.equal(param, value)
    with model.full_parameters(writeback=True):
        model.head.weight.data.fill_(2.0)
    assert torch.equal(model.state_dict()["head.weight"], torch.full((11, 6), 2.0).double())
    assert not any(unit.gathered for unit in model.units)


def test_parameters_can_be_read_and_written_whole() -> None:
    ec.run(opens, 2)


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
        (lambda world: shard(world, shard(world)), "is wrapped already"),
        (lambda world: shard(world, shard(world).module), "is wrapped already"),
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


def test_different_models_are_named() -> None:
    with pytest.raises(ModelMismatch, match=r"'up\.weight'"):
        ec.run(lambda world: shard(world, Block(6, 7 + world.rank), units=ec.units.whole()), 2)
    with pytest.raises(ModelMismatch, match="values of parameter"):
        ec.run(lambda world: shard(world, build(seed=world.rank), init="verify"), 2)
    with pytest.raises(ModelMismatch, match="option 'layout'"):
        ec.run(lambda world: shard(world, layout=("flat", "rows")[world.rank]), 2)


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


# --- where memory is not shared ------------------------------------------------------------------


def every_check(world: World) -> None:
    """One start of ranks for all of them."""
    for layout in ("flat", "rows"):
        for check in (saves, saves_parts, keeps_bits):
            check(world, layout)
    streams(world)
    for check in (refuses_values, saves_on_rank_0, opens, computes_low, ignores):
        check(world)


def test_all_of_it_holds_over_gloo() -> None:
    run_world("gloo", every_check, 2)


def shared_checks(world: World) -> None:
    """What depends on how memory is shared."""
    streams(world)
    saves_parts(world, "flat")


def test_it_holds_over_processes() -> None:
    run_world("processes", shared_checks, 2)
