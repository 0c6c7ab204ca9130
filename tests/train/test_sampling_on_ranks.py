"""Ranks that read parts of the same batches train as one process does, and agree what they read."""

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import echelon as ec
from echelon.errors import CheckpointError, StateError
from echelon.train.sample_order import SampleOrder
from tests.worlds import run_world

NUM_SAMPLES, BATCH = 23, 11  # batches of 11, 11 and 1: in the last one some ranks have no sample
WIDTH = 5

State = dict[str, Any]


def features() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def loader_of(sampler: ec.ResumableSampler, workers: int = 0) -> DataLoader[Tensor]:
    return DataLoader(features(), batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 2).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# --- weights ----------------------------------------------------------------------------------


def trains(world: ec.World, num_steps: int, folder: str) -> State:
    """Some steps more than have been saved in a folder; returns the state after them."""
    model = ec.DDP(make_model(), world.group)
    optimizer = make_optimizer(model)
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, world.group)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
    done = ec.load(folder, **parts).step if ec.steps(folder) else 0
    last = features()[:1]
    for batch in islice(sampler.batches(loader_of(sampler), epochs=None), num_steps):
        last = last if batch is None else batch  # of weight 0: any batch of the right form
        (sampler.weight * model(last).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ec.save(folder, step=done + num_steps, **parts)
    return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


def trained_alone(num_steps: int) -> dict[str, Tensor]:
    """The weights after some steps of one process that knows no sampler."""
    model = make_model()
    optimizer = make_optimizer(model)
    order = SampleOrder(num_samples=NUM_SAMPLES, batch_size=BATCH)
    batches = [order.samples(epoch, b) for epoch in range(num_steps) for b in order.batches()]
    for batch in batches[:num_steps]:
        model(features()[batch]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def check(state: State, num_steps: int) -> None:
    for name, expected in trained_alone(num_steps).items():
        # float64; the ranks add in another order
        torch.testing.assert_close(state["model"][name], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "size"), [("threads", 1), ("threads", 3), ("processes", 2), ("gloo", 2)]
)
def test_weighted_parts_train_as_one_process_does(kind: str, size: int, tmp_path: Path) -> None:
    for state in run_world(kind, trains, size, (7, str(tmp_path))):
        check(state, 7)


@pytest.mark.slow
def test_a_job_that_goes_on_with_other_numbers_of_ranks_trains_as_one_process_does(
    tmp_path: Path,
) -> None:
    num_steps = 0
    for size, more in ((3, 1), (1, 1), (4, 3), (2, 2)):
        states = ec.run(trains, size, args=(more, str(tmp_path)))
        num_steps += more
    check(states[-1], num_steps)
    assert (states[0]["sampler"]["epoch"], states[0]["sampler"]["position"]) == (2, 11)


def loads_another_order(world: ec.World, folder: str) -> bool:
    model = ec.DDP(make_model(), world.group)
    before = copy.deepcopy(model.state_dict())
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, world.group, seed=1)
    with pytest.raises(CheckpointError, match="seed is 0 there and 1 here"):
        ec.load(folder, model=model, sampler=sampler)
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_of_another_order_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    ec.run(trains, 2, args=(1, str(tmp_path)))
    assert ec.run(loads_another_order, 3, args=(str(tmp_path),)) == [True] * 3


# --- random generators ------------------------------------------------------------------------


def drops_out(
    sampler: ec.ResumableSampler, num_steps: int, workers: int, model: nn.Module
) -> list[float]:
    """The losses of some steps with dropout."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in islice(sampler.batches(loader_of(sampler, workers), epochs=None), num_steps):
        loss = model(nn.functional.dropout(batch, 0.5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def stops_and_goes_on(world: ec.World, workers: int) -> None:
    """Dropout of a rank goes on where it was; what other ranks draw meanwhile does not matter."""
    place = (world.rank, world.size)
    model, sampler = make_model(), ec.ResumableSampler(NUM_SAMPLES, 5, place)
    torch.manual_seed(world.rank)
    expected = drops_out(sampler, 9, workers, model)
    for cut in (2, 5):
        resumed, sampler = make_model(), ec.ResumableSampler(NUM_SAMPLES, 5, place)
        torch.manual_seed(world.rank)
        losses = drops_out(sampler, cut, workers, resumed)
        state, generator = sampler.state_dict(), torch.get_rng_state()
        torch.manual_seed(99)  # a new process
        sampler = ec.ResumableSampler(NUM_SAMPLES, 5, place)
        sampler.load_state_dict(state)
        torch.set_rng_state(generator)
        losses += drops_out(sampler, 9 - cut, workers, resumed)
        assert losses == expected
        assert all(map(torch.equal, model.parameters(), resumed.parameters()))


@pytest.mark.parametrize(
    ("kind", "size", "workers"), [("threads", 3, 0), ("processes", 2, 0), ("processes", 1, 2)]
)
def test_a_resumed_job_drops_out_what_the_job_without_a_stop_does(
    kind: str, size: int, workers: int
) -> None:
    run_world(kind, stops_and_goes_on, size, (workers,))


# --- agreement --------------------------------------------------------------------------------


def disagree(world: ec.World) -> list[str]:
    messages = []
    for seed, num in ((world.rank, 0), (0, world.rank)):
        sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, world.group, seed=seed)
        sampler.load_state_dict({**sampler.state_dict(), "position": BATCH * num})
        with pytest.raises(StateError, match="do not read the same data") as info:
            sampler.batches(loader_of(sampler))
        messages.append(str(info.value))
    return messages


def test_ranks_of_a_group_that_would_read_other_data_are_named() -> None:
    for seeds, positions in ec.run(disagree, 2):
        assert "rank 1: {'num_samples': 23, 'batch_size': 11, 'seed': 1" in seeds
        assert "'position': 0" in positions.splitlines()[1]
        assert "'position': 11" in positions.splitlines()[2]


def read_on_a_mesh(world: ec.World) -> Tensor:
    sampler = ec.ResumableSampler(NUM_SAMPLES, BATCH, world.mesh(pp=2, dp=2)["dp"])
    batch = next(sampler.batches(loader_of(sampler)))
    assert batch is not None
    return batch


def test_stages_of_a_pipeline_read_the_same_batches() -> None:
    first, second, third, fourth = ec.run(read_on_a_mesh, 4)
    assert torch.equal(first, third)
    assert torch.equal(second, fourth)
    order = SampleOrder(num_samples=NUM_SAMPLES, batch_size=BATCH)
    whole = features()[order.samples(0, range(BATCH))]
    assert torch.equal(torch.cat([first, second]), whole)


# --- ``len(loader)`` is how many batches the loop gets, however the sampler is given to the loader


@pytest.mark.parametrize(("num_samples", "drop_last"), [(24, False), (26, False), (26, True)])
def test_the_length_of_a_loader_is_its_number_of_batches(num_samples: int, drop_last: bool) -> None:
    data = torch.arange(num_samples)
    for rank in range(3):
        sampler = ec.ResumableSampler(num_samples, 8, (rank, 3), drop_last=drop_last)
        share = (3, 3, 2)[rank]
        loaders = [
            DataLoader(data, batch_sampler=sampler),
            DataLoader(data, sampler=sampler, batch_size=share),
            DataLoader(data, sampler=sampler, batch_size=None),
        ]
        batches = [[*sampler.batches(loader)] for loader in loaders]
        with_samples = sum(batch is not None for batch in batches[0])
        assert len(sampler) == sampler.num_batches == len(batches[0])
        assert len(loaders[0]) == len(loaders[2]) == len(batches[0])
        assert len(loaders[1]) == with_samples
