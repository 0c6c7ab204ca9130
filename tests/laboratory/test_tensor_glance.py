"""What is kept of a tensor, how it reads, and which elements have changed."""

from __future__ import annotations

import math

import pytest
import torch

from echelon.comm.object_bytes import from_object
from echelon.laboratory.tensor_glance import Contents, TensorGlance

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_tensor_is_kept_whole_and_stays_when_it_changes(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1], dtype=dtype)
    glance = TensorGlance.of([tensor], keep=3)
    tensor.zero_()
    assert glance.is_whole
    assert glance.values.tolist() == [0, 1, 1]
    assert (glance.numel, glance.nbytes) == (3, 3 * dtype.itemsize)
    assert glance.norm == (math.sqrt(2) if dtype.is_floating_point else None)


def test_of_a_large_tensor_few_numbers_and_the_norm_are_kept() -> None:
    tensor = torch.full((10_000,), 2.0)
    glance = TensorGlance.of([tensor, tensor[:3]], keep=100)
    assert not glance.is_whole
    assert glance.lengths == (10_000, 3)
    assert glance.values.tolist() == [2.0] * (16 + 3)
    assert glance.norm == pytest.approx(2 * math.sqrt(10_003))
    assert glance.text().plain == "[2., 2., … | 2., 2., …] 10,003 elements, norm 200."


def test_the_norm_of_complex_numbers_counts_both_parts() -> None:
    glance = TensorGlance.of([torch.tensor([3 + 4j])], keep=1)
    assert glance.norm == 5
    assert glance.text().plain == "[3+4j]"


def test_parts_for_many_ranks_are_cut_in_the_text() -> None:
    parts = [torch.tensor([rank]) for rank in range(12)]
    text = TensorGlance.of(parts, keep=100).text().plain
    assert text == "[0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | …] 12 elements"


def test_nothing_reads_as_empty_brackets() -> None:
    assert TensorGlance.of([torch.empty(0)], keep=100).text().plain == "[]"
    halves = [torch.empty(0), torch.ones(2)]
    assert TensorGlance.of(halves, keep=100).text().plain == "[ | 1., 1.]"


def test_changed_elements_are_bold() -> None:
    text = TensorGlance.of([torch.arange(4)], keep=100).text(changed=[(1, 3)])
    bold = [text.plain[span.start : span.end] for span in text.spans if "bold" in str(span.style)]
    assert bold == ["1", "2"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_of_a_small_tensor_are_exact(dtype: torch.dtype) -> None:
    parts = [torch.zeros(4, dtype=dtype), torch.empty(0, dtype=dtype), torch.zeros(4, dtype=dtype)]
    contents = Contents(parts, keep=8)
    assert contents.changes() == []
    parts[0][3] = parts[2][0] = parts[2][2] = 1
    assert contents.changes() == [(3, 5), (6, 7)]


def test_bits_count_and_not_values() -> None:
    tensor = torch.tensor([0.0, torch.nan])
    contents = Contents([tensor], keep=8)
    assert contents.changes() == []
    tensor[0] = -0.0
    assert contents.changes() == [(0, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [300, 100_001])
def test_changes_of_a_large_tensor_are_those_of_blocks(dtype: torch.dtype, numel: int) -> None:
    tensor = torch.arange(numel).to(dtype)
    contents = Contents([tensor], keep=0)
    assert contents.changes() == []
    length = -(-numel // 256)
    tensor[5], tensor[-1] = -1, -1
    tensor[2 * length], tensor[2 * length + 1] = -2, -3
    changes = contents.changes()
    first, last = 5 // length * length, (numel - 1) // length * length
    assert changes[0][0] == first
    assert any(start <= 2 * length < end for start, end in changes)
    assert changes[-1] == (last, numel)
    assert sum(end - start for start, end in changes) <= 4 * length


def test_a_swap_of_two_elements_of_a_block_is_a_change() -> None:
    tensor = torch.arange(100_000.0)
    contents = Contents([tensor], keep=0)
    tensor[:2] = tensor[:2].flip(0)
    assert contents.changes() == [(0, 391)]


def test_objects_read_as_objects_and_other_bytes_as_bytes() -> None:
    parts = [from_object({"a": 1}, "a"), from_object([2], "b"), torch.empty(0, dtype=torch.uint8)]
    glance = TensorGlance.of(parts, keep=1000).with_objects()
    assert glance.text().plain == "{'a': 1} | [2] | "
    assert glance.values.dtype is torch.uint8
    assert TensorGlance.of(parts, keep=10).with_objects().objects == ()  # not kept whole
    no_object = TensorGlance.of([torch.ones(3, dtype=torch.uint8)], keep=10).with_objects()
    assert no_object.text().plain == "[1, 1, 1]"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_narrow_dtypes_are_read_as_numbers(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.5, -2.0]).to(dtype)
    glance = TensorGlance.of([tensor], keep=3)
    assert glance.dtype is dtype
    assert glance.norm == 2.5
    assert glance.values.tolist() == [0, 1.5, -2]


@pytest.mark.parametrize("dtype", [torch.bits8, torch.int4, torch.uint3, torch.float4_e2m1fn_x2])
def test_dtypes_without_arithmetic_are_read_as_bytes(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 3, 255], dtype=torch.uint8).view(dtype)
    glance = TensorGlance.of([tensor], keep=3)
    assert (glance.dtype, glance.nbytes, glance.norm) == (dtype, 3, None)
    assert glance.text().plain == "[0, 3, 255]"
    contents = Contents([tensor], keep=3)
    tensor.view(torch.uint8)[1] = 4
    assert contents.changes() == [(1, 2)]


def test_values_of_inference_tensors_may_be_used_outside_of_inference() -> None:
    with torch.inference_mode():
        glance = TensorGlance.of([torch.ones(3)], keep=3)
    glance.values.add_(1)
    assert not glance.values.is_inference()
