"""Bytes of objects are refused if they are damaged."""

from collections.abc import Callable

import pytest
import torch

import echelon as ec
from echelon.comm.buffers import from_bytes
from echelon.comm.object_bytes import flat_bytes, from_object, to_object


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:4],
        lambda data: data[:-12],
        lambda data: from_bytes(b"\xff" * 64),
        lambda data: from_bytes((9).to_bytes(8, "little") + b'{"value":'),
        lambda data: from_bytes((2).to_bytes(8, "little") + b"[]"),
        lambda data: from_bytes(data.numpy().tobytes().replace(b"float32", b"qint32 ")),
        lambda data: from_bytes(data.numpy().tobytes().replace(b"[2]", b"[9]")),
        lambda data: from_bytes(data.numpy().tobytes().replace(b"$tensor", b"$tensed")),
    ],
)
def test_damaged_bytes_of_an_object_are_refused_with_the_rank_that_sent_them(
    damage: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    data = from_object({"x": torch.ones(2), "n": 5}, "the object")
    assert to_object(data, 3)["n"] == 5
    with pytest.raises(ec.CommError, match="rank 3 sent what is no object"):
        to_object(damage(data), 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.complex64])
def test_one_element_with_any_stride_has_its_bytes(dtype: torch.dtype) -> None:
    element = torch.ones(6, dtype=dtype)[::6]
    assert element.stride() == (6,)
    received = to_object(from_object({"x": element}, "the object"), 0)
    assert torch.equal(received["x"], element)
    assert flat_bytes(element).data_ptr() == element.data_ptr()
    assert flat_bytes(element[1:]).shape == (0,)
