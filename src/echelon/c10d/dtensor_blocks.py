"""Which block of the full tensor a rank has of a ``DTensor``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from echelon.errors import UnsupportedError


def block_of(tensor: Tensor) -> tuple[slice, ...]:
    """The slices of the full tensor that this rank has.

    Raises:
        UnsupportedError: the tensor is no DTensor.
    """
    if not isinstance(tensor, DTensor):
        raise UnsupportedError(
            f"a parameter is a {type(tensor).__name__}, and only plain tensors and DTensors are "
            "known: give a model with plain parameters"
        )
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor of this rank's block."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
