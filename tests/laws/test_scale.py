"""Scale: what a rank does in a step depends on the model, not on how many ranks there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echelon.fsdp.shard_layout import layout_by_element, layout_by_rows
from tests.rank_zero import (
    UNEVEN,
    Instructions,
    TensorsMade,
    blocks,
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
