"""Small tensors share a message with its header, and large ones do not."""

import torch

from echelon.pipeline.boundary import TensorSpec
from echelon.pipeline.packed_message import MAX_PACKED_NBYTES, PackedMessage

CPU = torch.device("cpu")


def test_small_tensors_of_every_dtype_share_a_packet_and_large_ones_do_not() -> None:
    tensors = [
        torch.tensor(True),
        torch.randn(3, 2, dtype=torch.complex128),
        torch.empty(0, 4),
        torch.arange(MAX_PACKED_NBYTES + 1, dtype=torch.uint8),
        torch.randn(5).bfloat16(),
        torch.arange(MAX_PACKED_NBYTES // 8),
    ]
    forms = tuple(TensorSpec(tuple(t.shape), t.dtype, False) for t in tensors)
    packet = PackedMessage(3, forms, CPU)
    assert packet.large_specs == [forms[3]]
    for room, tensor in zip(packet.views, tensors, strict=True):
        if room is not None:
            room.copy_(tensor)
    for room, tensor in zip(packet.views, tensors, strict=True):  # none lies on another
        assert room is None or torch.equal(room, tensor)
    assert packet.header.tolist() == [0, 0, 0]
