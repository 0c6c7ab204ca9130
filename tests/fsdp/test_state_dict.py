"""The state of a sharded model: whole, in parts, and on rank 0 alone."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError
from tests.fsdp.checking import plain_grads, same_grads, shard, whole_grads
from tests.fsdp.models import batch, build, loss_of
from tests.fsdp.test_policy import computes_low, ignores
from tests.reference import assert_states_equal
from tests.worlds import run_world

# --- state ---------------------------------------------------------------------------------------


def saves(world: World, layout: str) -> None:
    model = shard(world, layout=layout)
    expected = build(seed=1).state_dict()
    report = model.load_state_dict(expected)
    assert report == ([], [])
    state = model.state_dict()
    assert list(state) == list(expected)
    assert_states_equal(state, expected)
    model.load_state_dict({**state, "shift": state["shift"] + 1})
    assert torch.equal(model.module.shift, state["shift"] + 1)
    with pytest.raises(ArgumentError, match=r"blocks\.0\.scale: missing; more: unexpected"):
        model.load_state_dict(
            {**{k: v for k, v in state.items() if k != "blocks.0.scale"}, "more": torch.ones(1)}
        )
    with pytest.raises(ArgumentError, match=r"size mismatch for head\.weight"):
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
        ([1.0], "expected torch.Tensor"),
        (torch.ones(6, 7), r"copying a param with shape torch.Size\(\[6, 7\]\)"),
    ]:
        with pytest.raises(ArgumentError, match=rf"frozen\.weight.*{words}"):
            model.load_state_dict({**ones, "frozen.weight": wrong})
    assert_states_equal(model.sharded_state_dict(), before)
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
    assert_states_equal(model.state_dict(), plain)
    size = ec.local_shard(model.frozen.weight).shape
    larger = torch.ones(size[0] + 1, *size[1:])
    ones = {name: torch.ones_like(value) for name, value in state.items()}
    with pytest.raises(ArgumentError) as error:
        model.load_sharded_state_dict({**ones, "frozen.weight": larger})
    assert f"{tuple(larger.shape)} instead of {tuple(size)}" in str(error.value)
    with pytest.raises(ArgumentError, match="more: unexpected"):
        model.load_sharded_state_dict({**ones, "more": torch.ones(1)})
    assert_states_equal(model.sharded_state_dict(), state)


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_a_rank_saves_and_loads_its_parts(layout) -> None:
    ec.run(saves_parts, 3, args=(layout,))


def loads_inside(world: World) -> None:
    """A larger module saves and loads the plain keys below its own."""
    plain = nn.ModuleDict({"a": build(seed=1)}).state_dict()
    larger = nn.ModuleDict({"a": shard(world)})
    assert larger.load_state_dict(plain) == ([], [])
    state = larger.state_dict()
    assert list(state) == list(plain)
    assert_states_equal(state, plain)
    with pytest.raises(RuntimeError, match=r"size mismatch for a\.module\.head\.weight"):
        larger.load_state_dict({**plain, "a.head.weight": torch.ones(2)})
    with pytest.raises(ArgumentError, match="assign"):
        larger.load_state_dict(plain, assign=True)


def test_a_larger_module_saves_and_loads_a_sharded_one() -> None:
    ec.run(loads_inside, 3)


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


# --- the modules' own code ------------------------------------------------------------------------


LINEARS = ec.units.by_type(nn.Linear)


class Halves(nn.Linear):
    """Until version 1 its state had another name and twice the values."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w") / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Hooked(nn.Linear):
    """Its state has copies of another dtype and another name, and it may lack a bias."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_state_dict_post_hook(self.save)
        self.register_load_state_dict_pre_hook(self.load)
        self.register_load_state_dict_post_hook(self.after)

    @staticmethod
    def save(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}w"] = state.pop(f"{prefix}weight").half() * 2

    @staticmethod
    def load(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}w").float() / 2

    @staticmethod
    def after(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("bias")]
        module.largest = module.weight.abs().max().item()


def loads_by_own_code(world: World, layout: str, kind: type[nn.Linear]) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), kind(6, 6))

    plain, model = net(), shard(world, net(), layout=layout, units=LINEARS)
    old = {"0.weight": torch.ones(6, 6), "0.bias": torch.ones(6), "1.w": torch.ones(6, 6)}
    old |= {"1.bias": torch.ones(6)} if kind is Halves else {}
    for module in (plain, model):
        assert module.load_state_dict(old) == ([], [])
    assert model.module[1].__dict__.get("largest") == plain[1].__dict__.get("largest")
    expected = plain.state_dict()
    assert_states_equal(model.state_dict(), expected)
    parts = model.sharded_state_dict()
    assert {type(value) for value in parts.values()} == {type(model.state_dict()["0.bias"])}
    plain.load_state_dict(expected)
    for load, state in (
        (model.load_state_dict, model.state_dict()),
        (model.load_sharded_state_dict, parts),
    ):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(3)
        load(state)
        assert_states_equal(model.state_dict(), plain.state_dict())
    wrong = model.state_dict()
    wrong.update({"0.bias": torch.zeros(6), "more": torch.ones(1)})
    with pytest.raises(ArgumentError, match="more: unexpected"):
        model.load_state_dict(wrong)
    assert_states_equal(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("kind", [Halves, Hooked])
@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_modules_save_and_load_by_their_own_code(layout, kind) -> None:
    for ranks in (1, 2):
        ec.run(loads_by_own_code, ranks, args=(layout, kind))


# --- the whole state on one rank -----------------------------------------------------------------

WIDE = 64


def wide() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(6)))


def tensor_nbytes() -> int:
    """Of all tensors of this process; memory that several show counts once."""
    found = {}
    for one in gc.get_objects():
        if isinstance(one, Tensor):
            storage = ec.local_shard(one).untyped_storage()
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


# --- where memory is not shared ------------------------------------------------------------------


def every_check(world: World) -> None:
    """One start of ranks for all of them."""
    for layout in ("flat", "rows"):
        for check in (saves, saves_parts, keeps_bits):
            check(world, layout)
    streams(world)
    for check in (refuses_values, loads_inside, saves_on_rank_0, opens, computes_low, ignores):
        check(world)


@pytest.mark.slow
def test_all_of_it_holds_over_gloo() -> None:
    run_world("gloo", every_check, 2)


def shared_checks(world: World) -> None:
    """What depends on how memory is shared."""
    streams(world)
    saves_parts(world, "flat")


def test_it_holds_over_processes() -> None:
    run_world("processes", shared_checks, 2)
