"""Every sample of an evaluation once, in the order of the data, on any number of ranks."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import echelon as ec
from echelon.comm.world import World
from tests.worlds import KINDS, run_world

Pair = namedtuple("Pair", "half text")


def values_of(samples: torch.Tensor) -> dict[str, Any]:
    texts = [f"sample {i}" for i in samples.tolist()]
    boxes = [{"box": torch.full((i % 3, 2), float(i))} for i in samples.tolist()]
    half = (samples[:, None] * torch.tensor([1.0, 0.5])).to(torch.bfloat16).requires_grad_()
    return {"pair": Pair(half, texts), "boxes": boxes, "array": samples.numpy().astype(np.float32)}


def evaluates(
    world: World, num_samples: int, batch_size: int, shuffle: bool = False
) -> list[dict[str, Any]]:
    sampler = ec.ResumableSampler(num_samples, batch_size, world.group, shuffle=shuffle)
    loader = DataLoader(torch.arange(num_samples), batch_sampler=sampler)  # type: ignore[arg-type]
    results = []
    for batch in sampler.batches(loader):
        results.append(ec.gather_samples(None if batch is None else values_of(batch), sampler))
    return results


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "half": torch.cat([batch["pair"][0] for batch in batches]),
        "text": [text for batch in batches for text in batch["pair"][1]],
        "boxes": [box for batch in batches for box in batch["boxes"]],
        "array": np.concatenate([batch["array"] for batch in batches]),
    }


def check_equal(batches: list[dict[str, Any]], samples: torch.Tensor) -> None:
    actual, whole = joined(batches), values_of(samples)
    assert torch.equal(actual["half"], whole["pair"].half)
    assert not actual["half"].requires_grad
    assert actual["text"] == whole["pair"].text
    assert np.array_equal(actual["array"], whole["array"])
    assert len(actual["boxes"]) == len(samples)
    for box, expected in zip(actual["boxes"], whole["boxes"], strict=True):
        assert torch.equal(box["box"], expected["box"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_each_sample_once_in_the_order_of_the_data(kind: str) -> None:
    for batches in run_world(kind, evaluates, 3, (11, 5)):
        check_equal(batches, torch.arange(11))


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(0, 6), st.integers(1, 20))
def test_any_number_of_ranks_gathers_what_one_process_has(
    ranks: int, more: int, num_samples: int
) -> None:
    results = ec.run(evaluates, ranks, args=(num_samples, ranks + more))
    for batches in results:
        check_equal(batches, torch.arange(num_samples))


def test_a_shuffled_sampler_gives_its_own_order_on_any_number_of_ranks() -> None:
    first = joined(ec.run(evaluates, 1, args=(10, 4, True))[0])["text"]
    assert first != sorted(first)
    assert sorted(first) == [f"sample {i}" for i in range(10)]
    assert joined(ec.run(evaluates, 3, args=(10, 4, True))[2])["text"] == first


def gathers(world: World, values: list[Any]) -> Any:
    sampler = ec.ResumableSampler(3, 3, world.group, shuffle=False)
    loader = DataLoader(torch.arange(3), batch_sampler=sampler)  # type: ignore[arg-type]
    for _ in sampler.batches(loader):
        return ec.gather_samples(values[world.rank], sampler)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.ones(2), torch.ones(2)], "rank 1: values has 2 samples, and this rank has 1"),
        ([torch.ones(2), torch.tensor(1)], "rank 1: values is one number"),
        ([torch.ones(2), torch.ones(1, 2)], r"float32\[samples\] on rank 0, .*samples, 2\]"),
        ([np.ones(2), torch.ones(1)], "an array of float64"),
        ([{"a": [1, 2]}, {"b": [1]}], r"a dict of \['a'\] on rank 0, and a dict of \['b'\] on"),
        ([{"a": ([1, 2],)}, {"a": ([1], [1])}], r"values\['a'\] is a tuple of 1 on rank 0"),
        ([[1, 2], None], "rank 1: values is None; give a tensor"),
        ([(0.5,), [1]], r"rank 0: values\[0\] is 0.5; give a tensor"),
    ],
)
def test_values_that_are_not_those_of_the_samples_are_refused_on_every_rank(
    values: list[Any], message: str
) -> None:
    def refused(world: World) -> str:
        with pytest.raises(ec.ArgumentError, match=message) as info:
            gathers(world, values)
        return str(info.value)

    messages = ec.run(refused, 2)
    assert messages[0] == messages[1]


def test_a_rank_without_a_sample_gives_none() -> None:
    def main(world: World) -> str:
        with pytest.raises(
            ec.ArgumentError, match="rank 2: the values are those of no sample"
        ) as i:
            evaluates_wrongly(world)
        return str(i.value)

    assert len(set(ec.run(main, 3))) == 1


def evaluates_wrongly(world: World) -> None:
    sampler = ec.ResumableSampler(5, 3, world.group, shuffle=False)
    loader = DataLoader(torch.arange(5), batch_sampler=sampler)  # type: ignore[arg-type]
    for _ in sampler.batches(loader):
        ec.gather_samples(torch.ones(1), sampler)


def test_a_sampler_without_a_group_gathers_only_for_one_rank() -> None:
    alone, half = (ec.ResumableSampler(4, 2, (0, size), shuffle=False) for size in (1, 2))
    data = torch.arange(4)
    for batch in alone.batches(DataLoader(data, batch_sampler=alone)):  # type: ignore[arg-type]
        assert batch is not None
        assert torch.equal(ec.gather_samples(batch, alone), batch)
        with pytest.raises(ec.ArgumentError, match="values has 3 samples, and this rank has 2"):
            ec.gather_samples(torch.ones(3), alone)
    for batch in half.batches(DataLoader(data, batch_sampler=half)):  # type: ignore[arg-type]
        with pytest.raises(ec.ArgumentError, match="nothing can be gathered: give it a group"):
            ec.gather_samples(batch, half)
    with pytest.raises(ec.StateError, match="ask in the loop"):
        ec.gather_samples(torch.ones(3), alone)
