"""What a user of FSDP can do besides the plain loop; over simulated ranks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon.errors import ArgumentError, ModelMismatch, StateError
from echelon.world.base import World
from tests.fsdp.models import Block, batch, build, loss_of
from tests.worlds import run_world

BLOCKS = ec.units.by_type(Block)


def shard(world: World, model: nn.Module | None = None, **options: Any) -> ec.FSDP:
    options = {"units": BLOCKS, "min_num_params": 0, **options}
    return ec.FSDP(build() if model is None else model, world.group, **options)


def plain_grads(*batches: tuple[Tensor, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    """The mean of the gradients of these batches."""
    model = build()
    for one in batches:
        (loss_of(model, *one) * scale / len(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole_grads(model: ec.FSDP, world: World) -> dict[str, Tensor]:
    """The gradients of all ranks, put together."""
    found = {}
    for name, param in model.named_parameters():
        if param.grad is None:
            continue
        parts = world.group.all_gather_object(param.grad.flatten().tolist())
        info = model.shard_info(name)
        flat = [value for part in parts for value in part]
        found[name] = torch.tensor(flat, dtype=param.grad.dtype).view(info[0].shape)
    return found


def same_grads(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


# --- gradients -----------------------------------------------------------------------------------


def accumulates(world: World, way: str) -> None:
    model = shard(world)
    steps = 3
    mine = [batch(step, world.rank) for step in range(steps)]
    for i, one in enumerate(mine):
        loss = loss_of(model, *one) / steps
        if way == "shards" or i == steps - 1:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
            assert all(p.grad is None for p in model.parameters())
    same_grads(
        whole_grads(model, world),
        plain_grads(*(batch(s, r) for s in range(steps) for r in range(world.size))),
    )


@pytest.mark.parametrize("way", ["shards", "no_sync"])
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_gradients_accumulate_whole_or_in_shards(kind, way) -> None:
    run_world(kind, accumulates, 2, (way,))


def syncs_by_hand(world: World) -> None:
    model = shard(world)
    with model.no_sync():
        loss_of(model, *batch(0, world.rank)).backward()
        with pytest.raises(StateError, match="inside no_sync"):
            model.sync_gradients()
    model.sync_gradients()
    same_grads(whole_grads(model, world), plain_grads(*(batch(0, r) for r in range(world.size))))
    with pytest.raises(StateError, match="no gradients to reduce"):
        model.sync_gradients()


def test_gradients_are_reduced_by_hand() -> None:
    ec.run(syncs_by_hand, 3)


def divides(world: World, reduction: Any, scale: float) -> None:
    model = shard(world, reduction=reduction)
    loss_of(model, *batch(0, world.rank)).backward()
    expected = plain_grads(*(batch(0, r) for r in range(world.size)), scale=scale)
    same_grads(whole_grads(model, world), expected)


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 1.0), ("sum", 3.0), (4.0, 0.75)])
def test_the_reduction_is_what_was_asked_for(reduction, scale) -> None:
    ec.run(divides, 3, args=(reduction, scale))


def clips(world: World, norm_type: float) -> None:
    model = shard(world, min_num_params=100)
    loss_of(model, *batch(0, world.rank)).backward()
    plain = build()
    for r in range(world.size):
        (loss_of(plain, *batch(0, r)) / world.size).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    norm = ec.clip_grad_norm_(model, 0.01, norm_type)
    assert type(norm) is Tensor
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    for name, param in model.named_parameters():
        if param.grad is not None:
            info = model.shard_info(name)[world.rank]
            part = grads[name].flatten()[info.start : info.start + info.size]
            torch.testing.assert_close(param.grad.flatten(), part, rtol=1e-9, atol=0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
def test_the_norm_is_that_of_the_whole_model(norm_type) -> None:
    ec.run(clips, 3, args=(norm_type,))


# --- forward and backward ------------------------------------------------------------------------


class Generating(Block):
    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = self(x)
        return x


def generates(world: World) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Generating(6, 7))
    model = shard(world, copy.deepcopy(plain)[0], units=ec.units.by_type(nn.Linear))
    x = torch.randn(1, 6)
    with pytest.raises(StateError, match=r"generate\(\) of a sharded model needs whole"):
        model.generate(x, 2)
    with pytest.raises(StateError, match="unit 'up' is sharded, and was called outside"):
        model.module.up(x)
    with model.full_parameters(), torch.no_grad():
        if world.rank == 0:  # nothing is communicated inside
            torch.testing.assert_close(model.generate(x, 2), plain[0].generate(x, 2))
        with pytest.raises(StateError, match="inside a forward, a backward or another"):
            model.full_parameters().__enter__()
    assert not any(unit.gathered for unit in model.units)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_methods_other_than_forward_need_whole_parameters(kind) -> None:
    run_world(kind, generates, 2)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6, 7)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        if self.fails == "forward":
            raise KeyError("in forward")
        if self.fails == "backward":
            y.register_hook(self.fail)
        return y

    def fail(self, grad: Tensor) -> Tensor:
        raise KeyError("in backward")


def survives(world: World, where: str) -> None:
    torch.manual_seed(0)
    plain = Failing().double()
    model = shard(world, copy.deepcopy(plain))
    x = torch.randn(2, 6, dtype=torch.float64)
    model.module.fails = where
    with pytest.raises(KeyError):
        model(x).sum().backward()
    model.module.fails = ""
    model(x).sum().backward()
    plain(x).sum().backward()
    assert not any(unit.gathered for unit in model.units)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    same_grads(whole_grads(model, world), expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_the_step_after_an_exception_is_right(kind, where) -> None:
    run_world(kind, survives, 2, (where,))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(6, 7), Block(6, 4), Block(6, 5)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return checkpoint(lambda y: self.third(y) * 2, x, use_reentrant=self.reentrant)


def recomputes(world: World, reentrant: bool, strategy: ec.Strategy) -> None:
    torch.manual_seed(0)
    plain = Checkpointed(reentrant).double()
    model = shard(world, copy.deepcopy(plain), strategy=strategy)
    x = torch.randn(2, 6, dtype=torch.float64)
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    same_grads(whole_grads(model, world), {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.parametrize("strategy", [ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_activation_checkpointing_of_both_kinds(kind, reentrant, strategy) -> None:
    run_world(kind, recomputes, 2, (reentrant, strategy))


class Nested(nn.Module):
    """Takes and gives nested things, by position and by name; writes into a unit's output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float) -> dict[str, Any]:
        out = self.inner(pair, scale=scale)
        out["y"].add_(1)
        return out


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float) -> dict[str, Any]:
        a, named = pair
        return {"y": self.layer(a) * scale, "rest": [named["b"], "text", None]}


def nests(world: World) -> None:
    torch.manual_seed(0)
    plain = Nested()
    model = shard(world, copy.deepcopy(plain), units=ec.units.by_type(Inner))
    a, b = torch.randn(2, 6), torch.ones(1)
    found, expected = model((a, {"b": b}), scale=2.0), plain((a, {"b": b}), scale=2.0)
    torch.testing.assert_close(found["y"], expected["y"])
    assert found["rest"] == [b, "text", None]
    found["y"].sum().backward()
    expected["y"].sum().backward()
    expected_grads = {name: p.grad for name, p in plain.named_parameters()}
    same_grads(whole_grads(model, world), expected_grads)


def test_inputs_and_outputs_of_any_nesting() -> None:
    ec.run(nests, 2)


def evaluates(world: World) -> None:
    model = shard(world)
    tokens, _ = batch(0, 0)
    expected = build()(tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected)
    assert not any(unit.gathered for unit in model.units)
    model.eval()
    assert not model.module.blocks[0].training
    output = model(tokens)
    assert output.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), expected)
    loss_of(model, *batch(0, world.rank)).backward()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_evaluation_releases_at_once(kind) -> None:
    run_world(kind, evaluates, 2)


def skips(world: World) -> None:
    """Rank 1 does not use the middle block in the first step, nobody does in the second."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(6, 7) for _ in range(3))

        def forward(self, x: Tensor, used: bool) -> Tensor:
            x = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](x) if used else x)

    torch.manual_seed(0)
    plain = Skipping().double()
    model = shard(world, copy.deepcopy(plain))
    x = torch.randn(2, 6, dtype=torch.float64)
    for used in ([True, False], [False, False], [True, True]):
        model(x, used[world.rank]).sum().backward()
        for one in used:
            (plain(x, one).sum() / 2).backward()
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        same_grads(whole_grads(model, world), expected)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_units_may_be_skipped_on_some_ranks_where_memory_is_shared(kind) -> None:
    run_world(kind, skips, 2)


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


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_the_whole_state_is_saved_and_loaded_with_the_plain_keys(kind, layout) -> None:
    run_world(kind, saves, 3, (layout,))


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


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_parameters_can_be_read_and_written_whole(kind) -> None:
    run_world(kind, opens, 2)


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


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_compute_is_low_and_shards_are_not(kind) -> None:
    run_world(kind, computes_low, 2)


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
