"""Small tensors share a message with its header, and large ones do not."""

import torch

from echelon.pipeline.boundary import TensorSpec
from echelon.pipeline.packed_message import MAX_PACKED_NBYTES, PackedMessage, packed_message_at

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


def test_a_buffer_leads_to_its_message_as_long_as_that_lives() -> None:
    message = PackedMessage(8, (TensorSpec((2, 3), torch.float32, False),), CPU)
    buffer = message.buffer
    assert packed_message_at(buffer) is message
    assert packed_message_at(buffer.view(1, -1)) is message
    assert packed_message_at(buffer[:8]) is None
    assert packed_message_at(torch.zeros(48, dtype=torch.uint8)) is None
    del message
    assert packed_message_at(buffer) is None
