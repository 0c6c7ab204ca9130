"""The two ends of transfers, and messages that would be mistaken for each other."""

from echelon.pipeline.schedules.action_lists import read
from echelon.pipeline.schedules.transfer_ends import TransferEnd, TransferTable, crossed_messages


def test_a_send_and_its_receive_are_one_transfer() -> None:
    table = TransferTable(read("0F0 0SEND_F0\n1RECV_F0 1F0"))
    assert (table.sent, table.received) == ([TransferEnd(0, 1)], [TransferEnd(1, 0)])
    assert table.other_end(0, 0) == table.end_on(0, 1) == TransferEnd(1, 0)


def test_receives_in_the_order_of_sends_are_not_crossed() -> None:
    sends = "0F0 0F1 0SEND_F0 0SEND_F1\n"
    assert crossed_messages(read(sends + "1RECV_F0 1RECV_F1 1F0 1F1")) is None
    assert "1RECV_F1" in str(crossed_messages(read(sends + "1RECV_F1 1RECV_F0 1F0 1F1")))
