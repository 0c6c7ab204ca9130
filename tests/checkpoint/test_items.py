"""What a rank holds of any module, and the group of all ranks that share it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import echelon as ec
from echelon.checkpoint.items import group_of, holdings_of
from echelon.comm.mesh import Mesh
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError
from echelon.state.sharded_state import HasShards, ParameterShards, ShardedState
from echelon.state.tensor_shard import Replication
from tests.ddp.models import TiedLanguageModel
from tests.holding import check_params, filled, joined, write
from tests.pipeline.models import mse
from tests.reference import assert_states_equal
from tests.worlds import KINDS, run_world


def names_of(holdings: ShardedState) -> list[tuple[str, ...]]:
    return [one.names for one in holdings.tensors]


class Counting(nn.Linear):
    """Has something in its state that is no tensor, a buffer that is not in it, and one that is."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("count", torch.tensor(3))

    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


# --- plain modules -------------------------------------------------------------------------------


def test_a_plain_module_is_held_as_its_state_dict_shows_it() -> None:
    model = nn.Sequential(TiedLanguageModel(), Counting(), nn.BatchNorm1d(3))
    holdings = holdings_of(model, None)
    state = model.state_dict()
    assert [one.name for one in holdings.extras] == ["1._extra_state"]
    assert holdings.extras[0].module is model[1]
    del state["1._extra_state"]
    assert [name for names in names_of(holdings) for name in names[:1]] == [
        name for name in state if name != "0.head.weight"
    ]
    assert ("0.embedding.weight", "0.head.weight") in names_of(holdings)
    for one in holdings.tensors:
        assert torch.equal(one.values, state[one.name])
        assert (one.shape, one.start, one.is_whole) == (state[one.name].shape, 0, True)
        assert (one.copy, one.num_copies) == (0, 1)
        assert not one.values.requires_grad
    assert list(holdings.params) == list(model.parameters())
    check_params(holdings)
    assert holdings.axes == ()


def test_values_that_are_written_are_those_of_the_module() -> None:
    model = nn.Sequential(TiedLanguageModel(), nn.BatchNorm1d(3))
    weights = filled(copy.deepcopy(model), 7).state_dict()
    write(holdings_of(model, None), weights)
    assert_states_equal(model.state_dict(), weights)


def test_a_module_in_two_places_is_held_once_with_both_names() -> None:
    one = Counting()
    holdings = holdings_of(nn.ModuleDict({"a": one, "b": nn.Sequential(one)}), None)
    assert names_of(holdings) == [
        (f"a.{name}", f"b.0.{name}") for name in ("weight", "bias", "count")
    ]
    assert [extra.name for extra in holdings.extras] == ["a._extra_state"]


def test_what_compile_puts_into_names_is_left_out_and_nothing_else() -> None:
    plain = nn.ModuleDict({"my_orig_mod": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1)})
    expected = names_of(holdings_of(plain, None))
    plain["b"] = torch.compile(plain["b"], backend="eager")
    compiled = torch.compile(plain, backend="eager")
    assert names_of(holdings_of(compiled, None)) == expected
    assert expected[0] == ("my_orig_mod.weight",)


def test_ranks_have_copies_that_nobody_keeps_alike() -> None:
    def main(world: World) -> None:
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(world.rank)
        holdings = holdings_of(model, world.group)
        assert [(one.copy, one.replication) for one in holdings.tensors] == [
            (world.rank, Replication.PER_RANK)
        ]
        assert torch.equal(joined(holdings, world.group)["weight"], torch.zeros(1, 2))

    run_world("threads", main, 3)


# --- holders in modules --------------------------------------------------------------------------


def modules_with_holders_in_them(world: World) -> None:
    """Each says its own, under the names of the whole."""
    torch.manual_seed(0)
    plain = nn.ModuleDict(
        {
            "trunk": nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 4)),
            "norm": nn.BatchNorm1d(4),
            "head": TiedLanguageModel(),
            "alone": Counting(),
        }
    )
    expected = {name: one for name, one in plain.state_dict().items() if isinstance(one, Tensor)}
    model = nn.ModuleDict(dict(plain.items()))
    model["trunk"] = torch.compile(
        ec.FSDP(plain["trunk"], world.group, min_num_params=0), backend="eager"
    )
    model["head"] = ec.DDP(plain["head"], world.group)
    group = group_of([model], None)
    assert group is world.group
    holdings = holdings_of(model, group)
    assert_states_equal(joined(holdings, group), expected)
    kept = {one.name: one.replication for one in holdings.tensors}
    assert kept["trunk.0.weight"] is kept["head.scale"] is Replication.IDENTICAL
    assert kept["norm.running_mean"] is kept["alone.weight"] is Replication.PER_RANK
    assert [one.name for one in holdings.extras] == ["alone._extra_state"]
    assert set(holdings.params) == set(model.parameters())
    weights = {name: torch.full_like(one, 2) for name, one in expected.items()}
    write(holdings, weights)
    assert_states_equal(joined(holdings_of(model, group), group), weights)


@pytest.mark.parametrize("kind", KINDS)
def test_holders_inside_of_a_plain_module_say_what_they_hold(kind: str) -> None:
    run_world(kind, modules_with_holders_in_them, 3)


def test_a_tensor_that_a_holder_and_a_plain_module_share_is_as_the_holder_says() -> None:
    def main(world: World) -> None:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        first.register_buffer("both", torch.zeros(1))
        outer = nn.Linear(2, 2, bias=False)
        outer.weight = first.weight
        outer.register_buffer("both", first.both)
        model = nn.ModuleDict({"outer": outer, "inner": ec.DDP(first, world.group)})
        model["again"] = model["inner"]
        model["second"] = second
        held = {one.name: one for one in holdings_of(model, world.group).tensors}
        weight, both = held["outer.weight"], held["outer.both"]
        assert weight.names == ("outer.weight", "inner.weight", "again.weight")
        assert weight.replication is Replication.IDENTICAL
        assert both.names == ("outer.both", "inner.both", "again.both")
        assert both.replication is Replication.PRIMARY
        assert held["inner.bias"].names == ("inner.bias", "again.bias")
        assert held["second.bias"].replication is Replication.PER_RANK
        assert joined(holdings_of(model, world.group), world.group).keys() == (
            {f"{a}.{b}" for a in ("inner", "again") for b in ("weight", "bias", "both")}
            | {"outer.weight", "outer.both", "second.weight", "second.bias"}
        )

    run_world("threads", main, 2)


def test_a_method_called_holdings_does_not_make_a_holder() -> None:
    class Fund(nn.Linear):
        def holdings(self) -> str:
            return "shares"

    assert names_of(holdings_of(nn.Sequential(Fund(1, 1)), None)) == [("0.weight",), ("0.bias",)]


def test_holders_are_asked_outside_of_a_step() -> None:
    def main(world: World) -> None:
        model = nn.Sequential(ec.FSDP(nn.Linear(2, 2), world.group))
        with model[0].full_parameters(), pytest.raises(StateError, match="full_parameters"):
            holdings_of(model, world.group)
        assert group_of([model], None) is world.group

    run_world("threads", main, 2)


def test_a_save_and_a_load_ask_each_holder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    for kind in (ec.Pipeline, ec.FSDP, ec.DDP):

        def counted(
            self: Any, plain: Callable[[Any], ShardedState] = kind.holdings
        ) -> ShardedState:
            asked.append((type(self).__name__, id(self)))
            return plain(self)

        monkeypatch.setattr(kind, "holdings", counted)

    def main(world: World, one: ec.Plan) -> None:
        pipe = ec.parallelize([nn.Linear(2, 2), nn.Linear(2, 2)], one, world, loss_fn=mse)
        model = nn.ModuleDict({"a": pipe, "b": pipe})
        for act in (ec.save, ec.load):
            asked.clear()
            world.group.barrier()
            act(tmp_path / str(one.dp), step=1, model=model)
            world.group.barrier()
            assert len(asked) == len(set(asked)) == 2 * world.size
            world.group.barrier()

    for options in ({"dp": 2}, {"shard": 2}):
        one = ec.Plan(pp=2, microbatches=2, **options)
        run_world("threads", main, 4, (one,))


# --- what cannot be saved ------------------------------------------------------------------------


class Wrapping(Tensor):
    """Numbers that are not where torch thinks."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class Labelled(Tensor):
    """Plain numbers, and a name."""


ODD: list[tuple[Callable[[], Tensor], str]] = [
    (lambda: torch.empty(2, device="meta"), "on the meta device"),
    (lambda: nn.UninitializedBuffer(), "has no shape yet"),
    (lambda: torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
    (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "nested"),
    (lambda: Wrapping(torch.ones(2)), "is a Wrapping"),
    (lambda: FakeTensorMode().from_tensor(torch.ones(2)), "is a FakeTensor"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is torch.qint8"),
    (lambda: torch.ones(1).expand(5), "expanded"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, .* are deprecated")
@pytest.mark.parametrize(("make", "what"), ODD, ids=[what for _, what in ODD])
def test_what_is_not_plain_numbers_in_memory_is_refused_by_name(
    make: Callable[[], Tensor], what: str
) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("odd", make())
    with pytest.raises(ArgumentError, match=rf"'0\.odd' cannot be saved or loaded: it .*{what}"):
        holdings_of(model, None)


def test_a_lazy_parameter_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ArgumentError, match=r"'0\.weight'.*no shape yet"):
        holdings_of(model, None)


def test_plain_numbers_of_any_layout_in_memory_are_held() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    model.register_buffer("labelled", torch.ones(2).as_subclass(Labelled))
    model.register_buffer("conjugate", torch.ones(2, dtype=torch.complex64).conj())
    model.register_buffer("strided", torch.arange(6.0)[::2])
    model.register_buffer("empty", torch.empty(0, 3))
    weights = {
        name: torch.full(one.shape, 2, dtype=one.dtype) for name, one in model.state_dict().items()
    }
    write(holdings_of(model, None), weights)
    for name, one in model.state_dict().items():
        assert torch.equal(one.as_subclass(Tensor), weights[name]), name


# --- the group -----------------------------------------------------------------------------------


def ddp(group: ec.Group) -> nn.Module:
    return ec.DDP(nn.Linear(2, 2), group)


def test_the_group_is_that_of_the_axes_or_the_nearest_they_come_from() -> None:
    def main(world: World) -> None:
        halves = [world.group.subgroup(range(4)), world.group.subgroup(range(4, 8))]
        group = halves[world.rank // 4]
        assert group is not None
        outer = world.mesh(pp=2, dp=2, shard=2)
        inner = Mesh(group, {"replicate": 2, "shard": 2})

        def fsdp(mesh: ec.Mesh, replicate: str) -> nn.Module:
            hybrid = ec.Strategy.HYBRID_SHARD
            return ec.FSDP(
                nn.Linear(2, 2), mesh["shard"], replicate=mesh[replicate], strategy=hybrid
            )

        assert group_of([ddp(outer["dp"])], None) is outer["dp"]
        assert group_of([ddp(world.group)], None) is world.group
        assert group_of([fsdp(inner, "replicate")], None) is group
        both = nn.Sequential(fsdp(outer, "dp"), ddp(outer["pp"]))
        assert group_of([both], None) is world.group
        # Axes inside of another count with that.
        assert group_of([fsdp(inner, "replicate"), ddp(world.group)], None) is world.group
        assert group_of([ddp(inner["shard"]), nn.Linear(1, 1)], None) is inner["shard"]

    run_world("threads", main, 8)


def test_a_group_that_is_given_counts_if_it_has_all_ranks() -> None:
    def main(world: World) -> None:
        mesh = world.mesh(dp=2, other=2)
        model = ddp(mesh["dp"])
        assert group_of([model], world.group) is world.group
        assert group_of([nn.Linear(1, 1)], world.group) is world.group
        with pytest.raises(ArgumentError, match=r"group has ranks .* shared with ranks"):
            group_of([model], mesh["other"])
        with pytest.raises(ArgumentError, match="group is 'world'"):
            group_of([model], "world")

    run_world("threads", main, 4)


def test_a_rank_alone_needs_no_group() -> None:
    assert group_of([nn.Linear(1, 1)], None) is None
    assert group_of([], None) is None


class Shared(nn.Module, HasShards):
    """Of a library that is not ours."""

    def __init__(self, group: ec.Group | None) -> None:
        super().__init__()
        assert group is not None
        self._group = group

    def holdings(self) -> ShardedState:
        return ShardedState(tensors=(), params={}, axes=self.shared_over())

    def parameter_shards(self) -> tuple[ParameterShards, ...]:
        return ()

    def shared_over(self) -> tuple[ec.Group, ...]:
        return (self._group,)


def test_a_group_that_cannot_be_found_is_asked_for() -> None:
    def main(world: World) -> None:
        first = world.group.subgroup([0, 1])
        second = world.group.subgroup([0, 2])
        if world.rank == 0:
            # They could be two axes of four ranks, but nothing here has four.
            with pytest.raises(ArgumentError, match=r"which makes 4 ranks.*give group="):
                group_of([Shared(first), Shared(second)], None)

    run_world("threads", main, 5)
