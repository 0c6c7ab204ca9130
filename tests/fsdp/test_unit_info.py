"""One unit made whole by name, a wrapper taken off, whose part is whose, and memory in a report."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon import events
from echelon.errors import ArgumentError, StateError
from tests import reference
from tests.worlds import KINDS, run_world

CLOSE = {"rtol": 1e-11, "atol": 1e-13}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(4, 1)).double()


def rows(rank: int) -> Tensor:
    return reference.rows(rank, 3, 4)


def shard(world: ec.World, **options: Any) -> ec.FSDP:
    options = {"min_num_params": 0, "units": ec.units.by_type(nn.Sequential), **options}
    return ec.FSDP(build(), world.group, **options)


def whole_units(model: ec.FSDP) -> set[str]:
    return {unit.name for unit in model.units if unit.gathered}


def some_units(world: ec.World) -> None:
    model, plain = shard(world), build()
    for name in ("0", "0.0", "0.2.weight"):
        with model.full_parameters(name):
            assert whole_units(model) == {"0"}
            assert torch.equal(model.get_parameter("0.2.weight"), plain[0][2].weight)
            model.state_dict()
    with model.full_parameters("0", "2"):
        assert whole_units(model) == {"0", ""}
    assert not whole_units(model)
    with model.full_parameters("0", writeback=True), torch.no_grad():
        model.get_parameter("0.0.weight").fill_(3)
    assert set(model.state_dict()["0.0.weight"].flatten().tolist()) == {3.0}
    for wrong in ("3", "0.1", "", "0.0.weigh"):
        with pytest.raises(ArgumentError, match="has that name"), model.full_parameters(wrong):
            pass
    model(rows(world.rank)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_full_parameters_makes_the_units_whole_that_it_is_told(kind: str) -> None:
    run_world(kind, some_units, 2)


def unwraps(world: ec.World) -> None:
    for options in ({}, {"layout": "rows"}, {"use_orig_params": False}, {"min_num_params": 30}):
        model, plain = shard(world, **options), build()
        params = [*model.module.parameters()]
        plain(torch.cat([rows(0), rows(1)])).square().mean().backward()
        model(rows(world.rank)).square().mean().backward()
        module = model.unwrap()
        assert [*map(id, module.parameters())] == [*map(id, params)]
        for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found, expected)
            assert type(found.grad) is Tensor
            torch.testing.assert_close(found.grad, expected.grad, **CLOSE)
        for call in (model.state_dict, model.unwrap, model.grad_norm, lambda m=model: m(rows(0))):
            with pytest.raises(StateError, match=r"taken off its module by unwrap\(\)"):
                call()
        # It is a plain module again: it trains alone, is saved, and can be wrapped.
        for one in (module, plain):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            one(rows(0)).square().mean().backward()
            optimizer.step()
        reference.assert_states_close(module.state_dict(), plain.state_dict(), **CLOSE)
        again = ec.FSDP(module, world.group, min_num_params=0)
        again(rows(world.rank)).square().mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_unwrapped_is_the_plain_one_on_every_rank(kind: str) -> None:
    run_world(kind, unwraps, 2)


def test_a_shard_says_whether_it_is_here() -> None:
    def main(world: ec.World) -> None:
        for options in ({}, {"strategy": ec.Strategy.NO_SHARD}):
            shards = shard(world, **options).shard_info("0.0.weight")
            assert [one.is_local for one in shards] == [r == world.rank for r in range(world.size)]

    ec.run(main, 3)


def gradients_before(world: ec.World) -> None:
    for options in ({}, {"layout": "rows"}, {"use_orig_params": False}):
        plain, before = build(), build()
        for one in (plain, before):
            one(rows(5)).square().mean().backward()
        plain(torch.cat([rows(0), rows(1)])).square().mean().backward()
        model = ec.FSDP(before, world.group, min_num_params=0, **options)
        model(rows(world.rank)).square().mean().backward()
        for found, expected in zip(model.unwrap().parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_from_before_wrapping_is_added_to(kind: str) -> None:
    run_world(kind, gradients_before, 2)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def reports_memory(world: ec.World, folder: str) -> dict[str, tuple[int, int]]:
    model: Any
    with ec.observe.Recorder(world, folder, ec.observe.RunInfo(total_steps=1)) as recorder:
        if world.size == 2:
            model = shard(world)
            model(rows(0)).sum().backward()
        else:
            plan = ec.Plan(pp=2, shard=2, microbatches=1, fsdp={"min_num_params": 0})
            layers = [*build()]
            stages = [nn.Sequential(*layers[:1]), nn.Sequential(*layers[1:])]
            model = ec.parallelize(stages, plan, world, loss_fn=mean_square)
            model.step(rows(0), target=rows(0))
        recorder.measure(model, torch.optim.AdamW(model.parameters()))
    return {name: (one.live, one.peak) for name, one in recorder.memory.totals.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_report_knows_what_fsdp_holds_beside_its_parts(ranks: int, tmp_path: Any) -> None:
    for found in ec.run(reports_memory, ranks, args=(str(tmp_path / "run"),)):
        for category in ("parameters", "gradients", "gradients under way"):
            live, peak = found[category]
            assert peak >= live > 0
        assert {"whole parameters", "optimizer state"} <= {*found}


def test_messages_and_gathers_ahead_are_events_that_are_documented() -> None:
    heard: set[str] = set()
    operations: set[str] = set()

    def main(world: ec.World) -> None:
        model = shard(world, offload=ec.Offload.ALL)
        for _ in range(2):
            model(rows(world.rank)).sum().backward()
        value = torch.ones(1)
        (world.group.send if world.rank == 0 else world.group.recv)(value, 1 - world.rank)

    def hear(event: events.Event) -> None:
        heard.add(event.name)
        if event.name == "collective.issue":
            operations.add(event.facts["op"])

    with events.listen(hear):
        ec.run(main, 2)
    assert "fsdp.gather" in heard
    assert {"send", "recv"} <= operations
    assert all(f"``{name}``" in (events.__doc__ or "") for name in heard)
    assert "p2p.issue" not in (events.__doc__ or "")


def test_a_hook_on_many_gradients_is_registered_while_parameters_are_whole() -> None:
    def main(world: ec.World) -> None:
        torch.manual_seed(0)
        model = ec.FSDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), world.group,
                        units=ec.units.by_type(nn.Linear), min_num_params=0)  # fmt: skip
        params, seen = list(model.module.parameters()), []
        with model.full_parameters():
            hook = torch.autograd.graph.register_multi_grad_hook(params, seen.append)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
        hook.remove()
        assert [[tuple(g.shape) for g in grads] for grads in seen] == [
            [(3, 3), (3,), (2, 3), (2,)]
        ] * 2

    ec.run(main, 2)
