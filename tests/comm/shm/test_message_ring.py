"""Messages pass through a ring in pieces, in order, however long they are."""

import torch

from echelon.comm.shm.area import ring_nbytes
from echelon.comm.shm.message_ring import RingMessage, RingReader, RingWriter
from tests.comm.shm.areas import areas, call


def ends_of_a_ring() -> tuple[RingWriter, RingReader]:
    sender, receiver = areas(2)
    return RingWriter(sender, 0, 1), RingReader(receiver, 0, 1)


def message(tensor: torch.Tensor, position: int) -> RingMessage:
    return RingMessage.of(call("send", position), 1, 7 + position, tensor)


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
