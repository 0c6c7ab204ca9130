"""Shards of a storage, and the flat parameters that optimizers see in their place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError, UnsupportedError
from tests.fsdp.checking import shard
from tests.fsdp.models import batch, build, loss_of, train_plain
from tests.reference import assert_states_close, assert_states_equal
from tests.worlds import NCCL_RULES, run_world

CLOSE = {"rtol": 1e-11, "atol": 1e-12}
FLAT = {"use_orig_params": False}


def puts_shards_together(world: World) -> None:
    plain = dict(build().named_parameters())
    for options in ({}, {"layout": "rows"}, {"strategy": ec.Strategy.NO_SHARD}):
        for storage in shard(world, **options)._storages():
            for i, member in enumerate(storage.members):
                gathered = storage.gather_tensor(i, storage.shards[i], label=member.name)
                assert torch.equal(gathered, plain[member.name])
                assert torch.equal(storage.local_shard_of(i, gathered), storage.shards[i])


def looks_flat(world: World) -> None:
    model = shard(world, **FLAT)
    named = dict(model.named_parameters())
    # The root and the block that is used twice; the root has frozen parameters, too.
    assert list(named) == ["flat_0", "flat_1", *(f"blocks.{i}.flat_0" for i in range(3))]
    plain = dict(model.module.named_parameters())
    loss_of(model, *batch(0, world.rank)).backward()
    for unit in model.units:
        if unit.name:
            flat = named[f"{unit.name}.flat_0"]
            parts = [plain[name].flatten() for name in unit.names]
            assert torch.equal(flat, torch.cat(parts))  # in place: the same memory
            assert flat.grad is not None
            assert flat.shape == flat.grad.shape == (sum(map(len, parts)),)
    assert all(param.grad is None for param in plain.values())
    assert {n: p.requires_grad for n, p in named.items()}["flat_1"] is False
    assert [id(p) for p in model.parameters()] == [id(p) for p in named.values()]
    assert next(model.named_parameters("a"))[0] == "a.flat_0"
    assert model.num_parameters() == sum(p.numel() for p in build().parameters())
    total = sum(ec.local_shard(p).numel() for p in named.values())
    assert model.local_sharding_ratio() == total / model.num_parameters()
    model.zero_grad()
    assert all(param.grad is None for param in named.values())
    with pytest.raises(ArgumentError, match=f"expected {total} elements but got 2"):
        model.update_shards(torch.zeros(2))
    model.update_shards(torch.ones(total, dtype=torch.float64))
    assert all((value == 1).all() for name, value in model.state_dict().items() if name != "shift")


def trains(world: World, **options: Any) -> ec.FSDP:
    model = shard(world, **FLAT, **options)
    seen = list(model.parameters())
    optimizer = torch.optim.AdamW([p for p in seen if p.requires_grad], lr=0.05)
    for step in range(3):
        loss_of(model, *batch(step, world.rank)).backward()
        ec.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert [id(p) for p in model.parameters()] == [id(p) for p in seen]
    expected, _ = train_plain(world.size, 3, clip=0.1)
    assert_states_close(model.state_dict(), expected, **CLOSE)
    return model


def accumulates(world: World) -> None:
    model = shard(world, **FLAT)
    frozen = dict(model.named_parameters())["flat_1"]
    reference = shard(world)
    for one in (model, reference):
        loss_of(one, *batch(0, world.rank)).backward()
        loss_of(one, *batch(1, world.rank)).backward()
        kept = [p.grad.clone() for p in one.parameters() if p.grad is not None]
        one.zero_grad()
        loss_of(one, *batch(0, world.rank)).backward()
        with one.no_sync():  # leaves what is reduced as it is
            loss_of(one, *batch(1, world.rank)).backward()
        one.sync_gradients()
        grads = [p.grad for p in one.parameters() if p.grad is not None]
        torch.testing.assert_close(grads, kept, **CLOSE)
        one.zero_grad()
        with one.no_sync():
            loss_of(one, *batch(0, world.rank)).backward()
        loss_of(one, *batch(1, world.rank)).backward()
        grads = [p.grad for p in one.parameters() if p.grad is not None]
        torch.testing.assert_close(grads, kept, **CLOSE)
    assert frozen.grad is None
    torch.testing.assert_close(model.grad_norm(), reference.grad_norm(), **CLOSE)


def copies(world: World) -> None:
    model = shard(world, **FLAT)
    average = AveragedModel(model, use_buffers=True)
    clone = copy.deepcopy(model)
    assert [n for n, _ in clone.named_parameters()] == [n for n, _ in model.named_parameters()]
    first = model.state_dict()
    average.update_parameters(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    assert_states_close(clone.state_dict(), first, **CLOSE)
    average.update_parameters(model)
    with model.full_parameters():
        assert torch.equal(model.module.head.weight, 3 * first["head.weight"])
    name = "blocks.1.up.weight"
    torch.testing.assert_close(average.module.state_dict()[name], 2 * first[name], **CLOSE)
    loss_of(clone, *batch(0, world.rank)).backward()
    assert sum(p.grad is not None for p in clone.parameters()) == 4


def scales(world: World) -> None:
    """A gradient that is not finite on one rank keeps all flat parameters as they are."""
    low = ec.MixedPrecision(compute=torch.bfloat16, reduce=torch.float32)
    model = shard(world, build(torch.bfloat16), precision=low, **FLAT)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    scaler = ec.GradScaler(world.group, init_scale=4.0)
    before = model.state_dict()
    loss = loss_of(model, *batch(0, world.rank)).float()
    scaler.scale(loss * (float("inf") if world.rank else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    # Sums of gradients are kept in float32 beside .grad, and rounded to bfloat16, as without FLAT.
    once = shard(world, build(torch.bfloat16), precision=low)
    for one in (model, once):
        for factor in [1.0] + [2.0**-9] * 4:
            (loss_of(one, *batch(0, world.rank)) * factor).backward()
    plain = dict(once.named_parameters())
    for unit in model.units[1:]:
        flat = dict(model.named_parameters())[f"{unit.name}.flat_0"]
        expected = torch.cat([plain[name].grad.flatten() for name in unit.names])
        assert torch.equal(flat.grad, expected)


class Leaf(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)
        nn.init.constant_(self.bias, 0.25)


def starts_from_meta(world: World) -> None:
    with torch.device("meta"):
        plain = nn.Sequential(Leaf(3, 5), Leaf(5, 2))
    model = shard(world, plain, units=ec.units.by_type(Leaf), **FLAT)
    assert [name for name, _ in model.named_parameters()] == ["0.flat_0", "1.flat_0"]
    assert {x for p in model.parameters() for x in ec.local_shard(p).tolist()} <= {0.5, 0.25}


# --- optimizers ----------------------------------------------------------------------------------


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, some: range) -> None:
    for step in some:
        loss_of(model, *batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def shows_its_memory_to_numpy(world: World) -> None:
    expected, _ = train_plain(world.size, 3)
    start = {name: param.detach() for name, param in build().named_parameters()}

    def look(block: nn.Module, _: Any) -> None:
        block.up.weight.detach().numpy()

    for layout in ("flat", "rows"):
        model = shard(world, build(seed=1), layout=layout)
        for block in model.module.blocks:
            block.register_forward_pre_hook(look)
        with model.full_parameters(writeback=True):
            named = model.module.named_parameters()
            arrays = {name: param.detach().numpy() for name, param in named}
            for name, array in arrays.items():
                array[...] = start[name].numpy()
        steps(model, adam(model), world.rank, range(3))
        assert_states_close(model.state_dict(), expected, **CLOSE)
        assert_states_equal({name: torch.from_numpy(a) for name, a in arrays.items()}, start)


@pytest.mark.parametrize("kind", [NCCL_RULES, "gloo"])
def test_an_array_keeps_the_memory_of_a_whole_parameter_and_the_training_goes_on(kind) -> None:
    run_world(kind, shows_its_memory_to_numpy, 2)


def moves_between_kinds(world: World) -> dict[str, Any]:
    """Two steps one way, one step the other way: as three steps."""
    expected, _ = train_plain(world.size, 3)
    for first, then in ((True, False), (False, True), (False, False)):
        model = shard(world, use_orig_params=first)
        optimizer = adam(model)
        steps(model, optimizer, world.rank, range(2))
        state = model.optimizer_state_dict(optimizer)
        other = shard(world, build(seed=1), use_orig_params=then, min_num_params=100)
        other.load_state_dict(model.state_dict())
        resumed = adam(other)
        other.load_optimizer_state_dict(resumed, state)
        steps(other, resumed, world.rank, range(2, 3))
        assert_states_close(other.state_dict(), expected, **CLOSE)
    return {"state": state, "weights": model.state_dict()}


def resumes_alone(world: World, saved: dict[str, Any]) -> None:
    """The state of two ranks in one rank, flat, and in a plain optimizer."""
    model = shard(world, **FLAT)
    model.load_state_dict(saved["weights"])
    optimizer = adam(model)
    model.load_optimizer_state_dict(optimizer, saved["state"])
    again = model.optimizer_state_dict(optimizer)
    for name, entry in saved["state"]["state"].items():
        for key, value in entry.items():
            assert torch.equal(again["state"][name][key], value), (name, key)
    plain = build()
    names = [name for name, param in plain.named_parameters() if param.requires_grad]
    assert again["state"].keys() == set(names)
    numbered = {i: again["state"][name] for i, name in enumerate(names)}
    groups = [{**again["param_groups"][0], "params": list(range(len(names)))}]
    adam(plain).load_state_dict({"state": numbered, "param_groups": groups})
    entry = saved["state"]["state"]["blocks.0.scale"]
    saved["state"]["state"]["blocks.0.scale"] = {**entry, "step": torch.tensor(9.0)}
    with pytest.raises(ArgumentError, match=r"blocks\.0\.scale'.* have step .*one flat parameter"):
        model.load_optimizer_state_dict(optimizer, saved["state"])
    del saved["state"]["state"]["blocks.0.scale"]
    with pytest.raises(ArgumentError, match="have different states, and with use_orig_params"):
        model.load_optimizer_state_dict(optimizer, saved["state"])
    with pytest.raises(ArgumentError, match=r"not among model\.parameters"):
        model.optimizer_state_dict(torch.optim.SGD(model.module.parameters()))


def optimizer_from_before(world: World) -> None:
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = shard(world, plain, **FLAT)
    loss_of(model, *batch(0, world.rank)).backward()
    with pytest.raises(StateError, match=r"group 0 of SGD has a parameter .* after wrapping"):
        optimizer.step()
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    good.step()
    good.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    good.step()
    good.add_param_group({"params": [plain.blocks[0].up.weight]})
    with pytest.raises(StateError, match=r"group 2 of SGD .*'blocks\.0\.flat_0'"):
        good.step()


def orig_optimizer_from_before(world: World) -> None:
    plain = build()
    optimizer = adam(plain)
    model = shard(world, plain)
    steps(model, optimizer, world.rank, range(3))
    assert_states_close(model.state_dict(), train_plain(world.size, 3)[0], **CLOSE)


def test_an_optimizer_made_before_wrapping_trains_the_parts() -> None:
    ec.run(orig_optimizer_from_before, 2)


def test_where_flat_an_optimizer_made_before_wrapping_is_refused_at_its_step() -> None:
    ec.run(optimizer_from_before, 2)


# --- worlds --------------------------------------------------------------------------------------


def everything(world: World) -> None:
    """One start of ranks for all of them."""
    puts_shards_together(world)
    for check in (looks_flat, accumulates, copies, scales, starts_from_meta, moves_between_kinds):
        check(world)
    strategies = [ec.Strategy.FULL_SHARD, ec.Strategy.NO_SHARD]
    for strategy in strategies:
        trains(world, strategy=strategy)
    trains(world, min_num_params=100)
    if not world.group.shares_memory:
        trains(world, layout="rows")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_flat_parameters_do_what_those_of_the_model_do(kind: str) -> None:
    run_world(kind, everything, 2)


@pytest.mark.slow
def test_a_flat_state_goes_to_another_number_of_ranks_and_to_a_plain_optimizer() -> None:
    saved = ec.run(moves_between_kinds, 2)[0]
    ec.run(resumes_alone, 1, args=(saved,))


def refuses(world: World) -> None:
    with pytest.raises(UnsupportedError, match="layout='rows' where ranks share memory"):
        shard(world, layout="rows", **FLAT)
    with pytest.raises(ArgumentError, match="use_orig_params is 1"):
        shard(world, nn.Linear(2, 2), use_orig_params=1)


def test_rows_that_lie_apart_cannot_be_one_parameter() -> None:
    ec.run(refuses, 2)
