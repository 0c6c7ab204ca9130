"""Messages pass through a ring in pieces, in order, however long they are."""

from types import SimpleNamespace
from typing import Any

import torch

from echelon.comm.shm.area import Area, ring_nbytes
from echelon.comm.shm.message_ring import RingMessage, RingReader, RingWriter
from echelon.comm.shm.segment import Segment
from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall


def ends_of_a_ring() -> tuple[RingWriter, RingReader]:
    segment = Segment.create(Area.nbytes(2), what="a test", reserve=False)
    data = memoryview(segment.buffer)
    area: Any = SimpleNamespace(segment=segment, size=2, bytes=data, words=data.cast("I"))
    area.ring_start = lambda src, dst: Area.ring_start(area, src, dst)
    return RingWriter(area, 0, 1), RingReader(area, 0, 1)


def message(tensor: torch.Tensor, position: int) -> RingMessage:
    call = CollectiveCall(CallSignature("send"), CallSite("a.py", 1, "f"), position, "g", 0, True)
    return RingMessage.of(call, 1, 7 + position, tensor)


def test_messages_of_all_lengths_pass_in_order_and_wrap_around() -> None:
    writer, reader = ends_of_a_ring()
    numels = (0, 1, 50, ring_nbytes(2) // 4 + 3, 0, 3 * ring_nbytes(2) // 4, 5)
    for position, numel in enumerate(numels):
        source = torch.arange(numel, dtype=torch.int32) + position
        sent, target = message(source, position), torch.full_like(source, -1)
        assert reader.read_header() is None
        assert writer.write(sent)
        header = reader.read_header()
        assert header == (7 + position, 4 * numel, torch.int32, position)
        received = message(target, position)
        while not (reader.read(received) and received.num_moved == received.nbytes):
            writer.write(sent)
        assert torch.equal(target, source)
        assert reader.num_filled() == 0


def test_a_full_ring_takes_no_more_and_shows_that_its_sender_waits() -> None:
    writer, reader = ends_of_a_ring()
    long = message(torch.zeros(ring_nbytes(2), dtype=torch.uint8), 0)
    while writer.write(long):
        pass
    assert long.num_moved == ring_nbytes(2) - 64  # the header takes a line
    assert not writer.write(message(torch.zeros(1), 1))
    for is_starved in (True, False):
        writer.is_starved = is_starved
        assert reader.is_starved == writer.is_starved == is_starved
