"""Evaluation where ranks have different numbers of batches."""

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from tests.worlds import run_world


def wrapped(world: World, **options) -> ec.FSDP:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 64), nn.Linear(64, 1)).eval()
    return ec.FSDP(
        module, world.group, units=ec.units.by_type(nn.Linear), min_num_params=0, **options
    )


def evaluates(world: World, each: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1, 64), nn.Linear(64, 1))
    samples = torch.arange(10.0).view(10, 1)
    for strategy in (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP):
        model = wrapped(world, strategy=strategy)
        outputs = []
        with torch.no_grad():
            if each:
                sampler = ec.ResumableSampler(10, 4, world.group, shuffle=False)
                for batch in sampler.batches(
                    torch.utils.data.DataLoader(samples, batch_sampler=sampler)
                ):
                    with model.join():
                        values = None if batch is None else model(batch)
                    outputs.append(ec.gather_samples(values, sampler))
                torch.testing.assert_close(torch.cat(outputs), plain(samples))
            else:
                with model.join():
                    for _ in range(world.rank):
                        torch.testing.assert_close(model(samples), plain(samples))
        model(samples).sum().backward()  # training goes on


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("each", [True, False])
def test_a_rank_without_a_batch_takes_part_in_an_evaluation(kind: str, each: bool) -> None:
    ec.run(evaluates, 3, kind, args=(each,))


def evaluates_without_join(world: World, num_samples: int) -> None:
    model = wrapped(world)
    sampler = ec.ResumableSampler(num_samples, 3, world.group, shuffle=False)
    samples = torch.arange(float(num_samples)).view(num_samples, 1)
    with torch.no_grad():
        for batch in sampler.batches(torch.utils.data.DataLoader(samples, batch_sampler=sampler)):
            ec.gather_samples(None if batch is None else model(batch), sampler)


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("num_samples", [2, 5, 8])  # the first, second or third batch is short
def test_an_evaluation_without_join_names_it(kind: str, num_samples: int) -> None:
    with pytest.raises(ec.EchelonError) as caught:
        ec.run(evaluates_without_join, 3, kind, args=(num_samples,))
    assert "model.join()" in str(caught.value)


def trains(world: World) -> str:
    model = wrapped(world)
    with pytest.raises(ec.StateError, match="every rank needs a batch") as caught, model.join():
        if world.rank:
            model(torch.ones(1, 1))
    with pytest.raises(ec.StateError, match="inside join"), model.join(), model.join():
        pass
    return str(caught.value)


def test_a_forward_that_makes_a_graph_is_refused_on_all_ranks() -> None:
    assert len(set(ec.run(trains, 2))) == 1


def reshards(world: World) -> list[int]:
    gathered = []
    for units in (None, ec.units.by_type(nn.Linear)):
        for strategy in (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
            plain.load_state_dict(module.state_dict())
            model = ec.FSDP(
                module, world.group, units=units, strategy=strategy, min_num_params=0
            ).eval()
            for _ in range(2):
                output = model(torch.ones(1, 4))
                gathered.append(model.memory_stats().gathered)
                output.square().sum().backward()  # which unshards again
                plain(torch.ones(1, 4)).square().sum().backward()
            with model.full_parameters():
                pass
            whole = torch.cat([p.grad.flatten() for p in plain.parameters()])
            norm = ec.clip_grad_norm_(model, 1e9)
            torch.testing.assert_close(norm, whole.norm())
    return gathered


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_eval_reshards_all_units_after_a_forward(kind: str) -> None:
    assert all(set(gathered) == {0} for gathered in run_world(kind, reshards, 2))
