import pytest
import torch

import echelon as ec
from echelon.observe import matmul_flops


def test_a_processor_does_many_operations_a_second() -> None:
    speed = matmul_flops(torch.device("cpu"))
    assert 1e8 < speed < 1e14


def test_a_device_and_a_dtype_are_needed() -> None:
    with pytest.raises(ec.ArgumentError, match="device"):
        matmul_flops("cpu")
    with pytest.raises(ec.ArgumentError, match="dtype"):
        matmul_flops(torch.device("cpu"), "float32")
