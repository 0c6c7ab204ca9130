"""Messages meet their receives by tag and in order, whichever of the two comes first."""

import time

import pytest
import torch

import echelon as ec
from echelon.comm.shm import mailbox
from echelon.comm.shm.area import ring_nbytes
from echelon.comm.shm.mailbox import Mailbox
from echelon.errors import CollectiveMismatch, CommTimeout, StateError
from tests.comm.checking import same
from tests.comm.shm.areas import areas, call
from tests.processes import becomes_true

SEND, RECV = call("send"), call("recv")


def mailboxes(timeout: float = 20.0) -> tuple[Mailbox, Mailbox]:
    """Those of ranks 0 and 1."""
    first, second = (Mailbox(area) for area in areas(2, timeout))
    return first, second


def test_messages_find_their_tags_and_keep_the_order_of_one_tag() -> None:
    sender, receiver = mailboxes()
    posted = torch.zeros(1)
    work = receiver.recv(RECV, posted, 0, tag=2)  # one receive is posted before its message
    assert not work.done()
    for number, tag in enumerate((1, 2, 1)):
        assert sender.send(SEND, torch.tensor([10.0 + number]), 1, tag).done()
    work.wait()
    same(posted, torch.tensor([11.0]))
    for expected in (10.0, 12.0):
        output = torch.zeros(1)
        receiver.recv(RECV, output, 0, tag=1).wait()
        same(output, torch.tensor([expected]))


def test_a_message_without_a_receive_is_found_by_its_tag_until_the_receive_is_posted() -> None:
    sender, receiver = mailboxes()
    sender.send(SEND, torch.ones(3), 1, tag=5)
    assert receiver.probe(4) is None
    assert receiver.probe(5) == 0
    assert receiver.recv(RECV, torch.zeros(3), 0, tag=5).done()
    assert receiver.probe(5) is None


def test_a_message_longer_than_its_ring_moves_when_both_sides_look() -> None:
    sender, receiver = mailboxes()
    source = torch.arange(3 * ring_nbytes(2) // 4, dtype=torch.int32)
    output = torch.zeros_like(source)
    sending = sender.send(SEND, source, 1, tag=0)
    assert not sending.done()
    assert receiver.probe(0) == 0  # it has begun to arrive, and is kept
    receiving = receiver.recv(RECV, output, 0, tag=0)
    assert becomes_true(lambda: all([sending.done(), receiving.done()]), 20.0)
    same(output, source)


@pytest.mark.parametrize("first", ["message", "receive"])
def test_a_message_that_does_not_fit_is_an_error_and_the_next_one_arrives(first: str) -> None:
    sender, receiver = mailboxes()
    output = torch.zeros(2, dtype=torch.int32)
    if first == "message":
        sender.send(SEND, torch.ones(2), 1, tag=3)
    receiving = receiver.recv(RECV, output, 0, tag=3)
    if first == "receive":
        sender.send(SEND, torch.ones(2), 1, tag=3)
    with pytest.raises(CollectiveMismatch) as info:
        receiving.wait()
    assert "rank 0: send float32[2] with tag 3" in str(info.value)
    assert "rank 1: recv at a.py:1 in f" in str(info.value)
    sender.send(SEND, torch.tensor([4, 5], dtype=torch.int32), 1, tag=3)
    receiver.recv(RECV, output, 0, tag=3).wait()
    same(output, torch.tensor([4, 5], dtype=torch.int32))


def test_a_wait_that_times_out_names_the_sender_and_may_be_repeated() -> None:
    sender, receiver = mailboxes()
    output = torch.zeros(1)
    work = receiver.recv(RECV, output, 0, tag=0)
    with pytest.raises(CommTimeout) as info:
        work.wait(0.02)
    assert info.value.missing == (0,)
    sender.send(SEND, torch.tensor([7.0]), 1, tag=0)
    work.wait()
    same(output, torch.tensor([7.0]))


def test_helper_threads_move_a_long_message_while_both_ranks_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox, "_LOOK_S", 20.0)  # they are woken, and do not look by chance
    sender, receiver = mailboxes()
    ring_numel = ring_nbytes(2) // 4
    source = torch.arange(3 * ring_numel, dtype=torch.int32) + 1
    output = torch.zeros_like(source)
    sending = sender.send(call("send", blocking=False), source, 1, tag=0)
    receiving = receiver.recv(call("recv", blocking=False), output, 0, tag=0)
    # Nobody asks the works. What fits into the ring may stay there until somebody does.
    assert becomes_true(lambda: output[2 * ring_numel - 1] > 0, 10.0)
    for work in (sending, receiving):
        work.wait()
    same(output, source)
    for box in (sender, receiver):
        box.close()


def test_a_mailbox_that_is_closed_refuses_messages() -> None:
    sender, receiver = mailboxes()
    sender.close()
    receiver.abandon()
    for box, peer in ((sender, 1), (receiver, 0)):
        with pytest.raises(StateError, match="this rank has closed the world"):
            box.send(SEND, torch.ones(1), peer, tag=0)
        with pytest.raises(StateError, match="this rank has closed the world"):
            box.recv(RECV, torch.ones(1), peer, tag=0)


def test_messages_that_nobody_takes_end_the_close_by_name_at_the_timeout() -> None:
    sender, _ = mailboxes(timeout=0.05)
    sender.send(SEND, torch.ones(ring_nbytes(2)), 1, tag=0)
    with pytest.raises(CommTimeout, match="the end of the world, with messages unsent") as info:
        sender.close()
    assert info.value.missing == (1,)


def leaves_with_a_message(world: ec.World) -> float:
    value = torch.zeros(5)
    if world.rank == 0:
        world.group.isend(torch.ones(5), 1)  # not waited for: delivered all the same
    else:
        time.sleep(0.1)
        world.group.recv(value, 0)
    return value.sum().item()


def test_a_message_arrives_though_its_sender_has_left() -> None:
    assert ec.run(leaves_with_a_message, 2, "processes") == [0.0, 5.0]
