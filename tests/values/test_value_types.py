"""Names of dtypes are those of safetensors, both ways."""

import pytest
import safetensors.torch
import torch

from echelon.errors import ArgumentError
from echelon.values.value_types import DTYPES, FILE_DTYPES, dtype_name


@pytest.mark.parametrize("name", sorted(FILE_DTYPES))
def test_a_dtype_has_the_name_that_safetensors_writes(name: str) -> None:
    data = safetensors.torch.save({"a": torch.zeros(1, dtype=DTYPES[name])})
    assert f'"dtype":"{name}"'.encode() in data
    assert dtype_name(DTYPES[name]) == name


def test_the_only_dtype_beside_those_of_safetensors_is_complex128() -> None:
    assert set(DTYPES) - FILE_DTYPES == {dtype_name(torch.complex128)}
    with pytest.raises(KeyError):
        safetensors.torch.save({"a": torch.zeros(1, dtype=torch.complex128)})


def test_a_dtype_that_cannot_be_saved_is_refused_with_those_that_can() -> None:
    with pytest.raises(ArgumentError, match=r"complex32 cannot be saved.*use one of .*complex64"):
        dtype_name(torch.complex32)
    with pytest.raises(ArgumentError, match=r"qint8 cannot be saved.*use one of float64"):
        dtype_name(torch.qint8)
