"""What FSDP refuses to do, and that it says where, with which values and what to do instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from echelon.comm import streams
from echelon.comm.streams import PlainDevice
from echelon.comm.world import World
from echelon.errors import ArgumentError, ModelMismatch, StateError, UnsupportedError
from tests.fsdp.checking import same_grads, whole_grads
from tests.worlds import run_world

UNITS = ec.units.by_type(nn.Linear, nn.Embedding)


class Body(nn.Linear):
    """Fails with an input of another width, where its weight is in a variable."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return x @ weight.T


class Ties(nn.Module):
    """Uses the weight of a unit outside of its forward, in a way that is told."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.bodies = nn.ModuleList([Body(4, 4, bias=False)])
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.bodies[0](self.tokens(x))
        if self.way == "function":
            return F.linear(y, self.tokens.weight)
        if self.way == "variable":
            weight = self.bodies[0].weight
            y = y @ weight
        if self.way == "own mistake":
            return self.bodies[0](y[..., :3])
        return y


def fsdp(world: World, model: nn.Module, **options: Any) -> ec.FSDP:
    options = {"units": UNITS, "min_num_params": 0, **options}
    return ec.FSDP(model, world.group, **options)


def uses_released_parameters(world: World) -> None:
    torch.manual_seed(0)
    plain = Ties().double()
    model = fsdp(world, copy.deepcopy(plain))
    x = torch.tensor([[0, 3, 1]])
    for way, words in (
        (
            "function",
            r"linear\(\) needs the whole tensor.*'tokens\.weight' of unit 'tokens'",
        ),
        ("variable", r"'bodies\.0\.weight' .* of \[4, 4\]\. .*full_parameters\(\)"),
    ):
        model.module.way = way
        with pytest.raises(StateError, match=words):
            model(x)
    model.module.way = "own mistake"
    with pytest.raises(RuntimeError, match=r"size mismatch|shapes cannot|inconsistent") as own:
        model(x)
    assert not isinstance(own.value, StateError)
    model.module.way = ""
    model(x).sum().backward()
    plain(x).sum().backward()
    same_grads(whole_grads(model, world), {name: p.grad for name, p in plain.named_parameters()})
    with pytest.raises(StateError, match=r"unit 'tokens' is sharded, and was called outside"):
        model.module.forward(x)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_released_parameter_that_a_forward_uses_is_named(kind: str) -> None:
    run_world(kind, uses_released_parameters, 2)


def raises(error: type[Exception], words: str, make: Callable[[World], object]) -> None:
    def main(world: World) -> None:
        with pytest.raises(error, match=words):
            make(world)

    ec.run(main, 2)


def filled(layer: nn.Linear, value: float) -> nn.Linear:
    nn.init.constant_(layer.weight, value)
    return layer


def by_rank(model: nn.Module, rank: int) -> nn.Module:
    return model.requires_grad_(False) if rank else model


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("option 'units'", lambda w: fsdp(w, Ties(), units=ec.units.by_size(2 + w.rank))),
        (
            r"unit 'root':\n  rank 0: 16 elements of bodies\.0\.w.*\n  rank 1: 20 elements of tok",
            lambda w: fsdp(
                w, Ties(), units=ec.units.by_function(lambda m, n: n == 20 - 4 * w.rank)
            ),
        ),
        (
            r"unit 'root':\n  rank 0: 16 elements of bodies\.0\.weight\n.*tokens\.weight",
            lambda w: fsdp(
                w, model := Ties(), units=ec.units.whole(), ignored=[[*model.parameters()][w.rank]]
            ),
        ),
        (
            r"parameter 'tokens\.weight':\n  rank 0: float32.*\n  rank 1: float64",
            lambda w: fsdp(w, Ties().double() if w.rank else Ties()),
        ),
        (
            r"parameter '0\.weight':\n  rank 0: float32\[2, 2\]\n  rank 1: float32\[2, 2\] frozen",
            lambda w: fsdp(w, nn.Sequential(by_rank(nn.Linear(2, 2), w.rank), nn.Linear(2, 2))),
        ),
        (
            r"parameter '0\.weight':\n  rank 0: float32\[6, 2\]\n  rank 1: float32\[7, 2\]",
            lambda w: fsdp(w, nn.Sequential(nn.Linear(2, 6 + w.rank))),
        ),
        (
            r"the values of parameter '0\.weight'",
            lambda w: fsdp(w, nn.Sequential(filled(nn.Linear(2, 2), w.rank)), init="verify"),
        ),
        ("option 'layout'", lambda w: fsdp(w, Ties(), layout=("flat", "rows")[w.rank])),
        ("option 'use_orig_params'", lambda w: fsdp(w, Ties(), use_orig_params=bool(w.rank))),
    ],
)
@pytest.mark.filterwarnings("ignore:units=by_function.* matches no module:UserWarning")
def test_ranks_that_differ_are_told_in_what(words: str, make: Callable[[World], object]) -> None:
    raises(ModelMismatch, words, make)


def test_a_rule_that_matches_nothing_lists_the_classes_that_there_are() -> None:
    def main(world: World) -> None:
        with pytest.warns(UserWarning, match=r"by_type\(Block\) matches no mod.*Body, Embedding"):
            fsdp(world, Ties(), units=ec.units.by_type("Block"))

    ec.run(main, 1)


def test_a_group_of_a_world_that_has_ended_is_an_error_on_every_rank() -> None:
    groups = dict(ec.run(lambda world: (world.rank, world.group), 2))
    raises(StateError, "after its world was closed", lambda w: ec.FSDP(Ties(), groups[w.rank]))


def test_replicas_of_another_world_are_refused() -> None:
    others: dict[int, ec.Mesh] = dict(
        ec.run(lambda world: (world.rank, world.mesh(replicate=1, shard=2)), 2)
    )

    def make(world: World) -> object:
        replicate = others[1 - world.rank]["replicate"]
        hybrid = ec.Strategy.HYBRID_SHARD
        return fsdp(world, Ties(), strategy=hybrid, replicate=replicate)

    raises(ArgumentError, "of another world: give two axes of one mesh", make)


def test_reducing_before_a_forward_is_refused() -> None:
    raises(
        StateError,
        "were forward and backward called, under no_sync",
        lambda world: fsdp(world, Ties()).sync_gradients(),
    )


class Odd(nn.Module):
    """A layer and one parameter that no rank can send."""

    def __init__(self, odd: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.odd = nn.Parameter(odd, requires_grad=False)


def wraps_what_cannot_be_sharded(world: World) -> None:
    with pytest.raises(ArgumentError, match=r"ignored is Linear.*give a list"):
        fsdp(world, layer := nn.Linear(4, 2), ignored=layer)
    with pytest.raises(ArgumentError, match=r"'odd' is torch.float32 with layout torch.sparse_coo"):
        fsdp(world, Odd(torch.eye(3).to_sparse()))
    with pytest.raises(ArgumentError, match=r"'odd' is torch.qint8"):
        fsdp(world, Odd(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    run_world("threads", wraps_what_cannot_be_sharded, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module_is_refused() -> None:
    def wraps(world: World) -> None:
        scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 2)))
        with pytest.raises(ArgumentError, match=r"module '0' is a ScriptModule"):
            fsdp(world, scripted)

    run_world("threads", wraps, 1)


class OwnNorm(nn.BatchNorm1d):
    """Has a forward of its own, which takes care of dtypes."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float())


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("norm", "options", "refused"),
    [
        (lambda: nn.BatchNorm1d(4), {"compute": HALF}, True),
        (lambda: nn.BatchNorm1d(4), {"compute": HALF, "keep": (nn.LayerNorm,)}, True),
        (lambda: nn.BatchNorm1d(4), {"compute": HALF, "keep": (nn.BatchNorm1d,)}, False),
        (lambda: nn.BatchNorm1d(4), {"compute": HALF, "buffers": HALF}, False),
        (lambda: nn.BatchNorm1d(4), {"buffers": HALF}, True),
        (
            lambda: nn.BatchNorm1d(4),
            {"compute": HALF, "buffers": HALF, "keep": (nn.BatchNorm1d,)},
            True,
        ),
        (lambda: nn.BatchNorm1d(4), {"compute": torch.float32}, False),
        (lambda: nn.BatchNorm1d(4, affine=False), {"compute": HALF}, False),
        (lambda: nn.BatchNorm1d(4, track_running_stats=False), {"compute": HALF}, False),
        (lambda: nn.LayerNorm(4), {"compute": HALF}, False),
        (lambda: OwnNorm(4), {"compute": HALF}, False),
    ],
)
def test_a_batch_norm_is_refused_if_torch_would_refuse_its_dtypes_in_the_first_forward(
    norm: Callable[[], nn.Module], options: dict[str, Any], refused: bool
) -> None:
    def wraps(world: World) -> None:
        model = nn.Sequential(nn.Linear(4, 4), norm())
        precision = ec.MixedPrecision(**options)
        if refused:
            do = r"(keep=\(nn.BatchNorm1d|Leave buffers= out)"
            with pytest.raises(ArgumentError, match=rf"'1' is a BatchNorm1d .*bfloat16.*{do}"):
                ec.FSDP(model, world.group, precision=precision)
        else:
            wrapped = ec.FSDP(model, world.group, precision=precision, min_num_params=0)
            if not isinstance(model[1], OwnNorm):
                wrapped(torch.ones(3, 4)).sum().backward()

    run_world("threads", wraps, 2)


def test_a_batch_norm_whose_parameters_are_ignored_keeps_its_dtype() -> None:
    def wraps(world: World) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        precision = ec.MixedPrecision(compute=HALF)
        wrapped = ec.FSDP(model, world.group, precision=precision, ignored=[model[1]])
        wrapped(torch.ones(3, 4)).sum().backward()

    run_world("threads", wraps, 2)


SAVED = {"state": {}, "param_groups": []}


def gives_no_optimizer(world: World) -> None:
    model = fsdp(world, nn.Linear(4, 2), units=None)
    calls: list[Callable[[Any], object]] = [model.optimizer_state_dict, model.memory_stats]
    calls.append(lambda value: model.load_optimizer_state_dict(value, SAVED))
    for call in calls:
        with pytest.raises(ArgumentError, match=r"optimizer is 3; give a torch.optim.Optimizer"):
            call(3)
    with pytest.raises(ArgumentError, match=r"rank0_only is 'no'"):
        model.whole_state_dict(rank0_only="no")  # type: ignore[arg-type]


def test_what_is_no_optimizer_is_refused() -> None:
    run_world("threads", gives_no_optimizer, 2)


class Capturing(PlainDevice):
    """The CPU as a device whose work is recorded for a graph."""

    def is_capturing(self) -> bool:
        return True


def captures(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fsdp(world, nn.Linear(4, 2), units=None)
    loss = model(torch.ones(1, 4)).sum()
    with monkeypatch.context() as patch:
        patch.setitem(streams.kinds, "cpu", Capturing)
        with pytest.raises(UnsupportedError, match="a graph keeps the addresses"):
            model(torch.ones(1, 4))
    loss.backward()
    assert torch.isfinite(model(torch.ones(1, 4))).all()


def test_a_graph_that_would_keep_the_addresses_of_units_is_refused_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_world("threads", captures, 1, (monkeypatch,))
