"""Scale: what a rank does in a step depends on the model, not on how many ranks there are."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import echelon as ec
from echelon.comm.reduce_op import divide_for_mean
from echelon.fsdp.shard_layout import layout_by_element, layout_by_rows
from echelon.modules.norms import local_norm
from tests.rank_zero import (
    UNEVEN,
    Instructions,
    TensorsMade,
    blocks,
    held_nbytes,
    rank_zero,
    sharded,
    step,
)

RANKS = (4, 8, 24, 64, 96, 256, 1000, 4096)
WIDTH = 20  # of which hardly any number of ranks is a divisor
UNITS = 5


def calls_of_a_step(size: int, layout: str, rows: Sequence[int], **options: Any) -> Counter[str]:
    with rank_zero(size) as (group, calls):
        model = sharded(blocks(UNITS, WIDTH, rows), group, layout=layout, **options)
        for _ in range(3):  # in the second one the ranks compare which parameters are frozen
            step(model, WIDTH)
        calls.clear()
        step(model, WIDTH)
        return Counter(calls.counts)


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_a_step_has_as_many_engine_calls_on_any_number_of_ranks(layout: str) -> None:
    expected = calls_of_a_step(RANKS[0], layout, UNEVEN)
    assert expected["_allgather_base"] == 2 * UNITS
    assert expected["_reduce_scatter_base"] == UNITS
    assert not expected["broadcast"] + expected["alltoall_base"]
    for size in RANKS[1:]:
        assert calls_of_a_step(size, layout, UNEVEN) == expected, size


@example(rows=[1, 1, 1], size=4096, layout="flat")
@example(rows=[97, 1, 2], size=96, layout="rows")
@given(
    rows=st.lists(st.integers(1, 50), min_size=3, max_size=3),
    size=st.integers(2, 300),
    layout=st.sampled_from(["flat", "rows"]),
)
@settings(max_examples=8, deadline=None)
def test_no_shape_and_no_number_of_ranks_has_unequal_parts(
    rows: list[int], size: int, layout: str
) -> None:
    calls = calls_of_a_step(size, layout, rows)
    assert set(calls) == {"_allgather_base", "_reduce_scatter_base", "allreduce"}


@pytest.mark.parametrize("size", RANKS[:-1])
def test_unequal_parts_of_users_are_one_engine_call_on_any_number_of_ranks(size: int) -> None:
    lengths = [100 - (rank > 1) for rank in range(size)]
    with rank_zero(size) as (group, calls):
        whole, part = torch.ones(sum(lengths)), torch.ones(lengths[0])
        group.all_gather(whole.split(lengths), part)
        group.reduce_scatter_single(part, whole, splits=lengths)
        assert calls.counts == {"_allgather_base": 1, "_reduce_scatter_base": 1}


SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=5)


@example(shapes=[(8192, 8)], size=24, rows=False)
@example(shapes=[(7, 9000), (), (3, 0)], size=3, rows=True)
@given(shapes=SHAPES, size=st.integers(2, 40), rows=st.booleans())
def test_equal_parts_have_every_element_once_and_long_ones_begin_at_64_bytes(
    shapes: list[tuple[int, ...]], size: int, rows: bool
) -> None:
    layout = (layout_by_rows if rows else layout_by_element)(shapes, size, align=16)
    part = layout.part_numel
    assert part is not None
    assert part % 16 == 0 or part < 16 * 256
    assert max(layout.numels_by_rank) <= part
    assert sum(layout.numels_by_rank) == layout.numel
    if rows:  # the pieces of the parts are the rows of each parameter, in order
        parts = torch.arange(float(layout.padded_numel)).add(1)
        for shape, pieces in zip(shapes, layout.pieces(), strict=True):
            views = [piece.view(parts, shape).reshape(-1) for piece in pieces]
            assert sum(view.numel() for view in views) == torch.empty(shape).numel()
            ends = [piece.start + piece.count * piece.numel for piece in pieces]
            assert [piece.start for piece in pieces] == [0, *ends][: len(pieces)]
            assert len(pieces) <= 2
    else:
        assert layout.padded_numel - layout.numel < size * 16 * 17


@pytest.mark.parametrize("strategy", [ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_OPTIMIZER])
@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_between_forward_and_the_first_reduction_a_rank_holds_shards_and_no_gradients(
    layout: str, strategy: ec.Strategy
) -> None:
    width = 256
    block = 3 * (width + 2) * width * 4
    with rank_zero(8) as (group, _):
        before = held_nbytes()
        model = sharded(blocks(UNITS, width), group, layout=layout, strategy=strategy)
        for _ in range(2):
            step(model, width)
        loss = model(torch.ones(2, width)).sum()
        shards = sum(ec.local_shard(param).nbytes for param in model.parameters())
        stats = model.memory_stats()
        assert (stats.slots, stats.gradients) == (0, 0)
        # The graph, the batch and padding are much less than the slot of a block.
        assert held_nbytes() - before - shards - stats.gathered < block / 8
        loss.backward()
        assert (model.memory_stats().slots, model.memory_stats().gradients) == (0, shards)


def python_of_a_step(size: int, layout: str) -> tuple[int, int]:
    """The bytecode instructions and the tensors of a step."""
    with rank_zero(size) as (group, _):
        model = sharded(blocks(2, 64), group, layout=layout)
        for _ in range(3):
            step(model, 64)
        with Instructions() as instructions:
            step(model, 64)
        with TensorsMade() as made:
            step(model, 64)
        return instructions.count, made.num_tensors


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_python_of_a_step_is_that_of_8_ranks_on_1024(layout: str) -> None:
    few, many = python_of_a_step(8, layout), python_of_a_step(1024, layout)
    assert many[0] <= 1.2 * few[0]
    assert many[1] <= 1.2 * few[1]


def test_many_models_of_a_group_make_one_communicator() -> None:
    with rank_zero(8) as (group, calls):
        for _ in range(5):
            step(sharded(blocks(1, WIDTH), group), WIDTH)
        assert calls.num_engines == 2  # that of the group, and that of all gathers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_engine_that_averages_is_asked_for_means_and_nothing_follows(dtype: torch.dtype) -> None:
    tensor, part = torch.ones(80, dtype=dtype), torch.ones(10, dtype=dtype)
    with rank_zero(8) as (group, calls), TensorsMade() as made:
        group.all_reduce(tensor, "mean")
        group.reduce(tensor, 0, "mean")
        group.reduce_scatter_single(part, tensor, "mean")
        assert calls.ops == {"AVG": 3}
        assert not {"aten.mul_.Tensor", "aten.div_.Tensor"} & made.names.keys()
        half = tensor.half()
        group.all_reduce(half, "mean")
        assert calls.ops["SUM"] == 1
        assert half.tolist() == [0.125] * 80


def test_a_rank_alone_multiplies_no_mean() -> None:
    tensor = torch.ones(8)
    with rank_zero(1) as (group, _), TensorsMade() as made:
        group.all_reduce(tensor.half(), "mean")
        divide_for_mean(tensor, 1)
        assert "aten.mul_.Tensor" not in made.names


def test_a_norm_of_many_gradients_has_one_cast() -> None:
    gradients = [torch.ones(8) for _ in range(50)]
    with TensorsMade() as made:
        local_norm(gradients, 2.0, dtype=torch.float64)
    assert made.names["aten._to_copy.default"] == 1


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_a_model_has_as_many_objects_on_1024_ranks_as_on_8(layout: str) -> None:
    objects = []
    for size in (8, 8, 1024):  # the first one fills caches
        with rank_zero(size) as (group, _):
            model = blocks(25, 64)
            gc.collect()  # what other tests have left
            before = sys.getallocatedblocks()
            wrapped = sharded(model, group, layout=layout)
            objects.append(sys.getallocatedblocks() - before)
            assert len(wrapped.shard_info("0.scales.0")) == size
    _, few, many = objects
    assert many < 1.2 * few + 2 * 1024
