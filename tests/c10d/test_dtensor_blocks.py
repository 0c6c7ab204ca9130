import pytest
import torch

from echelon.c10d.dtensor_blocks import block_of, local_tensor
from echelon.errors import UnsupportedError


def test_a_plain_tensor_is_no_block() -> None:
    with pytest.raises(UnsupportedError, match="only plain tensors and DTensors are known"):
        block_of(torch.ones(2))


def test_a_plain_tensor_is_its_own_local_tensor() -> None:
    tensor = torch.ones(2)
    assert local_tensor(tensor) is tensor
