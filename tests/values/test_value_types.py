"""Names of dtypes are those of safetensors, both ways."""

import pytest
import safetensors.torch
import torch

from echelon.errors import ArgumentError
from echelon.values.value_types import DTYPES, dtype_name


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_has_the_name_that_safetensors_writes(name: str) -> None:
    data = safetensors.torch.save({"a": torch.zeros(1, dtype=DTYPES[name])})
    assert f'"dtype":"{name}"'.encode() in data
    assert dtype_name(DTYPES[name]) == name


def test_a_dtype_that_safetensors_does_not_have_is_refused_with_advice() -> None:
    with pytest.raises(ArgumentError, match=r"complex128 cannot be saved.*view_as_real"):
        dtype_name(torch.complex128)
    with pytest.raises(ArgumentError, match=r"qint8 cannot be saved.*use one of float64"):
        dtype_name(torch.qint8)
