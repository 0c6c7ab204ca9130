"""What programs do: drop works, leave early, fork, use many threads, tags and groups."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import echelon as ec
from tests import worlds
from tests.comm.checking import same

KINDS = ("threads", "processes")


def leaves_with_works_open(world: ec.World) -> float:
    tensors = [torch.ones(50_000) for _ in range(20)]
    works = [world.group.all_reduce(tensor, async_op=True) for tensor in tensors]
    if world.rank == 0:
        return 0.0  # without a wait: the others must get theirs all the same
    for work in works:
        work.wait()
    return sum(tensor[-1].item() for tensor in tensors)


def raises_with_works_open(world: ec.World) -> None:
    work = world.group.all_reduce(torch.ones(100_000), async_op=True)
    if world.rank == 1:
        raise ValueError("between issue and wait")
    second = world.group.all_reduce(torch.ones(100_000), async_op=True)
    work.wait()
    second.wait()


def uses_threads(world: ec.World) -> list[float]:
    groups = [world.group.subgroup(range(world.size)) for _ in range(4)]
    results = [0.0] * 4

    def background(number: int) -> None:
        group = groups[number]
        for step in range(25):
            value = torch.full((1 + step * 700,), float(number))
            group.all_reduce(value)
            if world.rank == 0:
                group.send(value, 1)
            elif world.rank == 1:
                group.recv(value, 0)
            results[number] += value[-1].item()

    threads = [threading.Thread(target=background, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def makes_many_groups(world: ec.World) -> float:
    total = 0.0
    for _ in range(100):
        value = torch.ones(3)
        world.group.subgroup(range(world.size)).all_reduce(value)
        total += value[0].item()
    return total


def sends_many_tags(world: ec.World) -> bool:
    num_tags = 400
    if world.rank == 0:
        works = [world.group.isend(torch.tensor([k]), 1, tag=k) for k in range(num_tags)]
        for work in works:
            work.wait()
    elif world.rank == 1:
        for k in random.Random(0).sample(range(num_tags), num_tags):
            value = torch.tensor([-1])
            world.group.recv(value, 0, tag=k)
            assert value.item() == k
    return True


def loads_data_with_workers(world: ec.World) -> float:
    data = TensorDataset(torch.arange(20.0))
    total = torch.zeros(1)
    for [batch] in DataLoader(data, batch_size=5, num_workers=1):
        part = batch.sum()[None]
        world.group.all_reduce(part)
        total += part
    return total.item()


def waits_on_another_thread(world: ec.World) -> list[float]:
    value, seen = torch.ones(10), []
    work = world.group.all_reduce(value, async_op=True)

    def wait() -> None:
        work.wait()
        seen.append(value[0].item())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    work.wait()
    return seen


def polls(world: ec.World) -> float:
    if world.rank == 0:
        time.sleep(0.05)
    value = torch.ones(10)
    work = world.group.all_reduce(value, async_op=True)
    while not work.done():
        time.sleep(0.001)
    work.wait()
    return value[0].item()


def works_in_inference_mode(world: ec.World) -> float:
    group = world.group
    with torch.inference_mode():
        value = torch.ones(300_000)
        group.all_reduce(value)
        group.all_reduce(value, async_op=True).wait()
        if world.rank == 0:
            group.send(value, 1)
        elif world.rank == 1:
            work = group.irecv(value, 0)
            time.sleep(0.02)
            work.wait()
    after = torch.ones(300_000)
    group.all_reduce(after)
    same(after, torch.full((300_000,), float(world.size)))
    return value[0].item()


def changes_its_mind(world: ec.World) -> float:
    """A backward whose hook communicates while another work is open, twice."""
    weight = torch.nn.Parameter(torch.ones(1000))
    works: list[ec.Work] = []

    def hook(parameter: torch.Tensor) -> None:
        works.append(world.group.all_reduce(parameter.grad, "mean", async_op=True))

    weight.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        (weight * (world.rank + 1.0)).sum().backward()
        world.group.barrier()
        works.pop().wait()
    return weight.grad[0].item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("main", "results"),
    [
        (leaves_with_works_open, [0.0, 60.0, 60.0]),
        (uses_threads, [[0.0, 75.0, 150.0, 225.0]] * 3),
        (makes_many_groups, [300.0] * 3),
        (sends_many_tags, [True] * 3),
        (loads_data_with_workers, [570.0] * 3),
        (waits_on_another_thread, [[3.0]] * 3),
        (polls, [3.0] * 3),
        (works_in_inference_mode, [9.0] * 3),
        # 2.0 after the first step; the second adds each rank's own and averages again
        (changes_its_mind, [4.0] * 3),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_it_survives_a_rank_that(kind: str, main: Callable[..., object], results: object) -> None:
    assert ec.run(main, 3, kind, timeout=30.0) == results


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_between_issue_and_wait_is_the_one_that_is_raised(kind) -> None:
    with pytest.raises(ValueError, match="between issue and wait") as info:
        ec.run(raises_with_works_open, 3, kind, timeout=30.0)
    assert info.value.__notes__ == ["raised on rank 1 of 3"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_world_can_be_started_right_after_one_that_failed(kind) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="between"):
            ec.run(raises_with_works_open, 2, kind, timeout=30.0)
    assert ec.run(polls, 2, kind) == [2.0, 2.0]


def calls_in_inference_mode(world: ec.World) -> None:
    group = world.group
    with torch.inference_mode():
        assert group.all_gather_object({"rank": world.rank}) == [{"rank": 0}, {"rank": 1}]
        values, parts = torch.full((3,), world.rank + 1.0), torch.zeros(6)
        for async_op in (False, True):
            reduced = values.clone()
            works = [
                group.all_reduce(reduced, async_op=async_op),
                group.all_gather_single(parts, values, async_op=async_op),
            ]
            for work in works:
                if work is not None:
                    work.wait()
            assert reduced.tolist() == [3.0] * 3
            assert parts.tolist() == [1.0] * 3 + [2.0] * 3
    model = ec.FSDP(torch.nn.Sequential(torch.nn.Linear(3, 3)), group, min_num_params=0)
    with torch.inference_mode():
        found = model(values)
    assert torch.equal(found, model(values.clone()).detach())


@pytest.mark.slow_for("processes", "gloo")
@pytest.mark.parametrize("kind", worlds.KINDS)
def test_calls_in_inference_mode_are_carried_out_at_once_or_beside_the_caller(kind: str) -> None:
    worlds.run_world(kind, calls_in_inference_mode, 2, timeout=20)


def refuses_what_is_no_value_of_its_kind(world: ec.World) -> None:
    model = ec.FSDP(torch.nn.Linear(3, 3), world.group, min_num_params=0)
    stages = [torch.nn.Linear(3, 3) for _ in range(world.size)]
    pipe = ec.Pipeline(stages, world.group, microbatches=2, loss_fn=torch.nn.MSELoss())
    calls: dict[str, Callable[[object], object]] = {
        "name": model.shard_info,
        "flat": model.update_shards,
        "data": world.group.all_gather_bytes,
        "state_dict": pipe.load_state_dict,
        "axes": lambda value: ec.Mesh(world.group, value),
    }
    for name, call in calls.items():
        for value in (None, 3, 1.5, object(), range(2), [1]):
            with pytest.raises(ec.ArgumentError, match=f"^{name} is "):
                call(value)


def test_a_value_of_another_kind_is_named_with_its_argument() -> None:
    worlds.run_world("threads", refuses_what_is_no_value_of_its_kind, 2)


def trains_what_was_made_in_inference_mode(world: ec.World, wrap: Callable[..., Any]) -> None:
    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        averages.update()

    model = torch.nn.Linear(64, 64)
    with torch.inference_mode():
        model = wrap(model, world.group)
        averages = ec.EMA(model)
    optimizer = torch.optim.Adam(model.parameters())
    step()
    with torch.inference_mode():
        saved = model.optimizer_state_dict(optimizer)
        model.load_optimizer_state_dict(optimizer, saved)
        whole = model.whole_state_dict()
        model.load_state_dict(whole)
    states = [value for state in saved["state"].values() for value in state.values()]
    assert not any(value.is_inference() for value in (*states, *whole.values()))
    step()
    with model.no_sync():
        model(torch.ones(2, 64)).sum().backward()
    with torch.inference_mode():
        model.sync_gradients()
    step()
    with torch.inference_mode():
        plain = model.unwrap()
    plain(torch.ones(2, 64, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize("wrap", [ec.FSDP, partial(ec.DDP, gradient_dtype=torch.bfloat16)])
def test_what_is_made_in_inference_mode_is_trained(kind, wrap) -> None:
    worlds.run_world(kind, trains_what_was_made_in_inference_mode, 2, args=(wrap,))
