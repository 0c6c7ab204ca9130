"""Values come back with types, bits and strides; bytes of anybody else are refused."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from echelon.errors import ArgumentError, BlackboxCorrupt
from echelon.laboratory.kept_values import from_bytes, members, to_buffers


def there_and_back(value: object) -> Any:
    return from_bytes(bytearray(b"".join(to_buffers(value, "batch"))), "file")


def test_values_come_back_with_their_types() -> None:
    value = {
        "text": "a",
        "nested": [(1, 2.5, None), OrderedDict(a=torch.arange(3)), {3: b"bytes"}],
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "narrow": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(True),
    }
    back = there_and_back(value)
    assert back["text"] == "a"
    assert back["nested"][0] == (1, 2.5, None)
    assert type(back["nested"][1]) is OrderedDict
    assert torch.equal(back["nested"][1]["a"], torch.arange(3))
    assert back["nested"][2] == {3: b"bytes"}
    np.testing.assert_array_equal(back["array"], value["array"])  # type: ignore[arg-type]
    assert back["array"].dtype == np.int16
    assert torch.equal(back["narrow"].view(torch.int16), value["narrow"].view(torch.int16))  # type: ignore[attr-defined]
    assert back["empty"].shape == (0, 3)
    assert back["scalar"].item() is True


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        torch.arange(40.0).view(10, 4)[1::3],
        torch.arange(12).view(3, 4).t(),
        torch.complex(torch.ones(2), torch.arange(2.0)).conj(),
    ],
    ids=["channels last", "rows", "transposed", "conjugated"],
)
def test_tensors_keep_their_strides(tensor: torch.Tensor) -> None:
    back = there_and_back([tensor])[0]
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1).expand(3, 4), torch.arange(1000.0)[::100]],
    ids=["expanded", "far apart"],
)
def test_tensors_that_share_or_waste_memory_come_back_contiguous(tensor: torch.Tensor) -> None:
    back = there_and_back(tensor)
    assert torch.equal(back, tensor)
    assert back.is_contiguous()


def test_what_cannot_be_kept_is_named_with_what_to_give() -> None:
    with pytest.raises(
        ArgumentError, match=r"batch\[1\] is a object, which cannot be kept by a bl"
    ):
        to_buffers([1, object()], "batch")
    with pytest.raises(ArgumentError, match=r"on meta"):
        to_buffers(torch.empty(2, device="meta"), "batch")


def test_the_fields_of_a_dataclass_and_of_a_mapping_are_its_members() -> None:
    @dataclass
    class Pair:
        x: int
        y: int

    assert members(Pair(1, 2)) == {"x": 1, "y": 2}
    assert type(members(OrderedDict(a=1))) is dict
    plain = {"a": 1}
    assert members(plain) is plain
    assert members(Pair) is Pair


@pytest.mark.parametrize("length", [0, 7, 20, 60, 100])
def test_bytes_that_end_early_are_refused(length: int) -> None:
    data = b"".join(to_buffers({"x": torch.arange(32)}, "batch"))
    with pytest.raises(BlackboxCorrupt, match="file: "):
        from_bytes(bytearray(data[:length]), "file")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"int64"', b'"int65"'),
        (b"[4],null", b"[44],null"),
        (b"[4],null,0", b"[4],null,1"),
        (b"[2,2],[1,2]", b"[2,2],[40,9]"),
        (b"[2,2],[1,2]", b"[2,2],[1,x]"),
        (b'"tensors"', b'"tensorz"'),
        (b'"$tensor":"0"', b'"$tensor":"9"'),
    ],
)
def test_bytes_of_another_form_are_refused(before: bytes, after: bytes) -> None:
    value = [torch.arange(4), torch.arange(4).view(2, 2).t()]
    data = b"".join(to_buffers(value, "batch"))
    assert before in data
    with pytest.raises(BlackboxCorrupt, match="file: "):
        from_bytes(bytearray(data.replace(before, after)), "file")
