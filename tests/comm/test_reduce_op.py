"""The rules of reduction, without any ranks."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.comm.reduce_op import BLOCK_NUMEL, OPS, check_op, reduce_into
from echelon.errors import ArgumentError
from tests.comm.checking import same
from tests.comm.dtype_checks import COMPLEX, EVERY, FLOATS, INTEGERS, has_meaning, reduced, values


def test_every_dtype_has_a_sum_and_a_product() -> None:
    assert all(has_meaning(op, dtype) for op in ("sum", "product") for dtype in EVERY)


@pytest.mark.parametrize(
    ("op", "dtype", "words"),
    [
        *[("mean", dtype, "use op='sum' and divide") for dtype in (*INTEGERS, torch.bool)],
        *[(op, dtype, "no order") for op in ("min", "max") for dtype in COMPLEX],
        *[(op, dtype, "integer or bool") for op in ("band", "bor") for dtype in FLOATS],
        ("avg", torch.float32, "use one of sum, mean, product, min, max, band, bor, bxor"),
        ("SUM", torch.float32, "unknown reduction 'SUM'"),
    ],
)
def test_an_operation_without_meaning_is_refused_with_what_to_do(op, dtype, words) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_op(op, dtype)


@pytest.mark.parametrize(
    ("op", "dtype"), [pair for pair in itertools.product(OPS, EVERY) if has_meaning(*pair)]
)
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_parts_are_combined_in_their_order_into_every_output(op, dtype, num_parts) -> None:
    parts = [values(dtype, seed) for seed in range(num_parts)]
    expected = reduced(parts, op)
    outputs = [torch.empty(37, dtype=dtype) for _ in range(3)]
    reduce_into(outputs, parts, op)
    for output in outputs:
        same(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16])
@pytest.mark.parametrize("own", [0, 1, 2])
def test_an_output_may_be_one_of_the_parts(dtype, own) -> None:
    for op in ("sum", "max"):
        parts = [values(dtype, seed) for seed in range(3)]
        expected = reduced(parts, op)
        reduce_into([parts[own]], parts, op)
        same(parts[own], expected)
        parts = [values(dtype, seed) for seed in range(3)]
        reduce_into(parts, parts, op)
        for part in parts:
            same(part, expected)


@pytest.mark.parametrize("numel", [0, 1, BLOCK_NUMEL - 1, BLOCK_NUMEL, 2 * BLOCK_NUMEL + 3])
def test_blocks_leave_nothing_out(numel) -> None:
    parts = [values(torch.float32, seed, numel) for seed in range(3)]
    output = torch.empty(numel)
    reduce_into([output], parts, "mean")
    same(output, (parts[0] + parts[1] + parts[2]) / 3)


def test_the_order_of_the_sum_is_the_order_of_the_parts() -> None:
    parts = [torch.tensor([value]) for value in (1e8, -1e8, 1.0)]
    for order in itertools.permutations(parts):
        output = torch.empty(1)
        reduce_into([output], order, "sum")
        same(output, order[0] + order[1] + order[2])


def test_a_narrow_sum_is_rounded_once() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    output = torch.empty(1, dtype=torch.bfloat16)
    reduce_into([output], parts, "sum")
    assert output.item() == 258.0
    assert (parts[0] + parts[1] + parts[2]).item() == 256.0  # rounded twice


def test_on_a_device_a_reduction_is_not_cut_into_blocks() -> None:
    class Operators(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    parts = [torch.empty(20 * BLOCK_NUMEL, device="meta") for _ in range(4)]
    with Operators() as operators:
        reduce_into([torch.empty_like(parts[0])], parts, "sum")
    assert operators.count <= len(parts) + 1
