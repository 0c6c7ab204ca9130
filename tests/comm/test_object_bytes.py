"""Bytes of objects are refused if they are damaged."""

from collections.abc import Callable

import pytest
import torch

import echelon as ec
from echelon.comm.buffers import from_bytes
from echelon.comm.object_bytes import from_object, to_object


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
