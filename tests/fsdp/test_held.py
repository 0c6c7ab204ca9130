"""What a rank holds of a sharded model: ranges that cover it once, and that can be written."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError
from echelon.state.tensor_shard import Replication
from tests.fsdp.models import PLAIN, Block, batch, build, has_effect, loss_of
from tests.fsdp.two_memories import separate, watched
from tests.holding import check_optimizer, filled, joined, write
from tests.reference import assert_states_equal
from tests.worlds import run_world

LOW = ec.MixedPrecision(compute=torch.bfloat16, buffers=torch.bfloat16)
MASTERS = ec.MixedPrecision(
    compute=torch.float32, master=torch.float64, reduce=torch.float64, buffers=torch.float32
)
HYBRID = [one for one in ec.Strategy if one.hybrid]


def wrap(world: World, model: nn.Module, **options: Any) -> ec.FSDP:
    """On all ranks; a hybrid strategy has two replicas."""
    options = {"units": ec.units.by_type(Block), "min_num_params": 0, **options}
    group, replicate = world.group, None
    if options.get("strategy", ec.Strategy.FULL_SHARD).hybrid:
        mesh = world.mesh(replicate=2, shard=-1)
        group, replicate = mesh["shard"], mesh["replicate"]
    return ec.FSDP(model, group, replicate=replicate, **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def train(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        loss_of(model, *batch(step, world.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def is_held_and_loaded(world: World, options: dict[str, Any]) -> None:
    """Holdings are the state after steps; what is written into them is what forward computes."""
    model = wrap(world, build(), **options)
    optimizer = optimizer_of(model)
    train(world, model, optimizer)
    holdings = model.holdings()
    found = joined(holdings, world.group)
    check_optimizer(holdings, optimizer)
    on_host = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    assert_states_equal(found, on_host)
    assert {one.replication for one in holdings.tensors} == {
        Replication.IDENTICAL,
        Replication.PER_RANK,
    }

    weights = filled(build(), 7).state_dict()
    write(holdings, weights)
    plain = build()
    plain.load_state_dict(weights)
    expected = wrap(world, plain, **options)
    tokens, targets = batch(5, world.rank)
    for grad in (torch.no_grad(), nullcontext()):
        with grad:
            assert torch.equal(model(tokens), expected(tokens))
    for one in (model, expected):
        loss_of(one, tokens, targets).backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
    if "precision" not in options:
        plain = build()
        plain.load_state_dict(weights)
        torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-11, atol=1e-12)


def all_are(world: World, cases: list[dict[str, Any]], apart: bool = False) -> None:
    """Args: whether host and device are two memories."""
    for options in cases:
        try:
            with watched() if apart else nullcontext():
                is_held_and_loaded(world, options)
        except BaseException as error:
            error.add_note(repr(options))
            raise


def all_are_apart(world: World, cases: list[dict[str, Any]]) -> None:
    """In a process of its own."""
    separate()
    all_are(world, cases, apart=True)


def combined(strategies: list[ec.Strategy], **options: Any) -> list[dict[str, Any]]:
    """Every layout and precision for each strategy, and flat parameters; some units stay whole."""
    cases: list[dict[str, Any]] = [
        {"strategy": strategy, **layout, **precision, **options}
        for strategy in strategies
        for layout in ({"layout": "flat"}, {"layout": "rows"}, {"use_orig_params": False})
        for precision in ({}, {"precision": LOW}, {"precision": MASTERS})
    ]
    cases = [{**one, "min_num_params": 100 * (i % 2)} for i, one in enumerate(cases)]
    return [
        one
        for one in cases
        if has_effect(one["strategy"], one.get("layout", "flat"), one["min_num_params"])
    ]


def offloaded(offload: ec.Offload) -> list[dict[str, Any]]:
    """Every combination that keeps something on the host."""
    strategies = [ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP]
    if offload is ec.Offload.OPTIMIZER:
        strategies.append(ec.Strategy.NO_SHARD)
    return combined(strategies, offload=offload)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", PLAIN)
def test_ranges_of_all_ranks_are_the_model_and_can_be_written(strategy: ec.Strategy) -> None:
    # Each layout and each precision once; tests/long has every combination.
    run_world("threads", all_are, 3, (combined([strategy])[PLAIN.index(strategy) % 2 :: 4],))


@pytest.mark.slow
def test_replicas_hold_the_same_ranges_and_can_be_written() -> None:
    run_world("threads", all_are, 4, (combined(HYBRID)[::5],))


@pytest.mark.slow
@pytest.mark.parametrize("offload", [ec.Offload.OPTIMIZER, ec.Offload.ALL])
def test_ranges_on_the_host_are_the_model_and_can_be_written(
    offload: ec.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate(monkeypatch)
    run_world("threads", all_are, 2, (offloaded(offload)[::5], True))


FEW = combined([ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP])[::4]


def in_processes(world: World) -> None:
    all_are(world, [*FEW[1:3], *combined(HYBRID)[4:6]] if world.group.shares_memory else FEW)
    all_are_apart(world, [{**one, "offload": ec.Offload.ALL} for one in FEW[1:3]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_ranges_in_processes_are_the_model_and_can_be_written(kind: str) -> None:
    run_world(kind, in_processes, 4)


# --- what is said of them ------------------------------------------------------------------------


@pytest.mark.slow
def test_parts_are_equal_and_the_rest_is_each_ranks_own() -> None:
    def main(world: World) -> None:
        plain = build()
        ignored = [plain.blocks[2], plain.frozen.weight]
        hybrid = {"strategy": ec.Strategy.HYBRID_SHARD, "min_num_params": 110}
        model = wrap(world, plain, ignored=ignored, **hybrid)
        held = {one.name: one for one in model.holdings().tensors}
        assert held["tokens.weight"].names == ("tokens.weight", "head.weight")
        own = {name for name, one in held.items() if one.replication is Replication.PER_RANK}
        assert own == {"shift", "frozen.weight"} | {n for n in held if n.startswith("blocks.2")}
        sharded, small = held["blocks.1.down.weight"], held["blocks.0.up.weight"]
        assert (sharded.copy, sharded.num_copies) == (world.rank // 2, 2)
        assert not sharded.is_whole
        for whole in (small, *(held[name] for name in own)):
            assert whole.is_whole
            assert (whole.copy, whole.num_copies) == (world.rank, 4)
        plain.shift.add_(world.rank)
        found = joined(model.holdings(), world.group)
        assert torch.equal(found["shift"], build().shift)
        assert model.holdings().axes == model.shared_over()
        assert [axis.size for axis in model.shared_over()] == [2, 2]

    run_world("threads", main, 4)


def test_names_are_those_of_a_model_that_was_not_compiled() -> None:
    def main(world: World) -> None:
        plain = build()
        plain.blocks[1] = torch.compile(plain.blocks[1], backend="eager")
        model = wrap(world, torch.compile(plain, backend="eager"), units=ec.units.whole())
        assert joined(model.holdings(), world.group).keys() == build().state_dict().keys()

    run_world("threads", main, 2)


def test_what_is_asked_for_in_the_middle_of_a_step_is_refused() -> None:
    def main(world: World) -> None:
        model = wrap(world, build())
        asked: list[str] = []

        def ask(*_: object) -> None:
            with pytest.raises(StateError, match="holdings"):
                model.holdings()
            asked.append("once")

        model.module.blocks[0].norm.register_forward_hook(ask)
        loss = loss_of(model, *batch(0, world.rank))
        model.holdings()  # between forward and backward nothing is under way
        model.module.blocks[0].scale.register_hook(ask)
        loss.backward()
        with model.full_parameters():
            ask()
        assert len(asked) == 4
        model.holdings()

    run_world("threads", main, 2)


def releases_what_a_schedule_left(world: World) -> None:
    """Whole parameters that stay over many passes are not of the old values afterwards."""
    for options in ({}, {"precision": MASTERS}):
        model = wrap(world, build(), **options)
        tokens, _ = batch(0, world.rank)
        model.gather_parameters()
        model(tokens)
        weights = filled(build(), 3).state_dict()
        write(model.holdings(), weights)
        plain = build()
        plain.load_state_dict(weights)
        expected = wrap(world, plain, **options)
        assert torch.equal(model(tokens), expected(tokens))


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_whole_parameters_that_a_schedule_left_are_given_up_when_parts_are_written(
    kind: str,
) -> None:
    run_world(kind, releases_what_a_schedule_left, 2)


def test_a_parameter_that_the_module_lost_stays_a_part_of_its_flat_parameter() -> None:
    def main(world: World) -> None:
        model = wrap(world, build(), use_orig_params=False)
        del model.module.blocks[1].scale
        holdings = model.holdings()
        assert "blocks.1.scale" not in {one.name for one in holdings.tensors}
        for param, own in holdings.params.items():
            assert ec.local_shard(param).numel() == sum(one.numel for one in own)
        names = {one.name for own in holdings.params.values() for one in own}
        assert names == {name for name, _ in build().named_parameters()}

    run_world("threads", main, 2)


def test_a_buffer_that_cannot_be_read_back_is_named() -> None:
    def main(world: World) -> None:
        plain = build()
        model = wrap(world, plain)
        plain.register_buffer("wide", torch.zeros(1).expand(5))
        with pytest.raises(ArgumentError, match=r"'wide' cannot be saved.*expanded"):
            model.holdings()

    run_world("threads", main, 2)
