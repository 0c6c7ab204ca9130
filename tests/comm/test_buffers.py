"""Tensors as 1D buffers, and new memory only where there is enough."""

import pytest
import torch

from echelon.comm import buffers
from echelon.comm.buffers import disjoint_input, flattened, from_bytes, is_expanded, zeros
from echelon.errors import SharedMemoryError

CPU = torch.device("cpu")


def test_a_contiguous_tensor_is_flattened_in_place_and_others_are_copied_back() -> None:
    dense, base = torch.zeros(2, 3), torch.zeros(3, 2)
    flat, steps = flattened(dense)
    assert (flat.shape, flat.data_ptr(), steps) == ((6,), dense.data_ptr(), ())
    for tensor in (base.t(), torch.zeros(6, dtype=torch.complex64).conj()):
        flat, (copy_back,) = flattened(tensor)
        flat.copy_(torch.arange(6.0))
        assert not tensor.any()
        copy_back()
        assert torch.equal(tensor.reshape(-1), torch.arange(6.0).to(tensor.dtype))


def test_an_input_is_copied_only_where_an_output_overlaps_it() -> None:
    memory = torch.arange(8.0)
    input, beside, shifted = memory[2:4], memory[4:6], memory[3:5]
    assert disjoint_input(input, [beside]) is input
    assert disjoint_input(input, [beside, input], input.data_ptr()) is input
    for outputs in ([shifted], [input]):
        copy = disjoint_input(input, outputs)
        assert copy.data_ptr() != input.data_ptr()
        assert torch.equal(copy, input)


def test_a_tensor_is_expanded_if_elements_share_memory() -> None:
    assert is_expanded(torch.zeros(1, 3).expand(2, 3))
    assert not is_expanded(torch.zeros(2, 3).t())


@pytest.mark.parametrize("data", [b"", b"\x00\xff\x07"])
def test_bytes_become_a_tensor_with_memory_of_its_own(data: bytes) -> None:
    tensor = from_bytes(data)
    tensor.add_(0)
    assert (tensor.dtype, tensor.numpy().tobytes()) == (torch.uint8, data)


def test_large_memory_is_refused_before_it_is_taken_and_small_memory_unasked(monkeypatch) -> None:
    monkeypatch.setattr(buffers, "available_nbytes", lambda: 2**20)
    with pytest.raises(SharedMemoryError, match=r"a test needs .* and 1\.0 MiB are") as info:
        zeros(2**40, torch.float32, CPU, what="a test")
    assert (info.value.needed, info.value.available) == (2**42, 2**20)
    with torch.inference_mode():
        tensor = zeros(2**19, torch.float32, CPU, what="a test")
    assert not tensor.is_inference()
    assert not tensor.any()


def test_a_write_into_a_part_marks_no_other_element_as_written() -> None:
    whole = torch.zeros(6, 2)
    part, column = whole[2:4], whole[:, 1]
    for tensor, source in ((part, torch.ones(4)), (column, torch.ones(6))):
        flat, steps = flattened(tensor)
        flat.copy_(source)
        for step in steps:
            step()
        assert torch.equal(tensor.reshape(-1), source)
    assert whole._version == 0
    flattened(whole.view(3, 4))[0].copy_(torch.ones(12))  # all of it
    assert whole._version == 1
