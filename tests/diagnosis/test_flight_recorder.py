"""A recorder tells where ranks are, also of those that were killed, and costs next to nothing."""

import multiprocessing
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall
from echelon.diagnosis.flight_recorder import FlightRecorder, Phase, RankRecord, RankStatus
from echelon.process.process_status import ProcessStatus


def ticket(position: int, label: str = "loss", file: str = "train.py") -> CollectiveCall:
    call = CallSignature("all_reduce", torch.float32, (10,), "sum", None, label)
    return CollectiveCall(call, CallSite(file, 12, "main"), position, "world.1", 0, True)


def entered() -> tuple[FlightRecorder, RankRecord]:
    """A recorder and its only record, which this process has begun."""
    book = FlightRecorder.private()
    book.rank_records[0].begin(rank=0, attempt=0)
    return book, book.rank_records[0]


def entry(record: RankRecord) -> RankStatus:
    found = record.read()
    assert found is not None
    return found


def writes_and_is_killed(path: str) -> None:
    record = FlightRecorder.open(path).rank_records[1]
    record.begin(rank=5, attempt=0)
    record.set_phase(Phase.RUNNING)
    record.record_step(7)
    record.record_call(ticket(41))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_rank_has_written_stays() -> None:
    book = FlightRecorder.create(2)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=writes_and_is_killed, args=(book.path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert list(book.statuses()) == [5]
    found = book.statuses()[5]
    assert (found.phase, found.step, found.where, found.ended) == (
        Phase.RUNNING,
        7,
        "at step 7",
        True,
    )
    assert found.call == (
        "all_reduce(sum) float32[10] of 'loss' (#41 of group 'world.1') at train.py:12 in main"
    )


def test_the_last_call_reads_as_its_ticket() -> None:
    _, record = entered()
    assert entry(record).call == ""
    for last in (ticket(0), ticket(1, "other"), ticket(2), ticket(2**31)):
        record.record_call(last)
        assert entry(record).call == str(last)


def test_a_call_that_was_made_before_is_not_formatted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, record = entered()
    record.record_call(ticket(0))
    monkeypatch.setattr(CallSignature, "__str__", lambda call: pytest.fail("formatted"))
    record.record_call(ticket(1))
    monkeypatch.undo()
    assert entry(record).call == str(ticket(1))


def test_more_calls_than_there_is_room_for_use_the_oldest_room_again() -> None:
    _, record = entered()
    for number in range(2500):
        record.record_call(ticket(number, f"layer {number}"))
        if number % 100 == 0 or number > 2490:
            assert entry(record).call == str(ticket(number, f"layer {number}"))
    record.record_call(ticket(2500, "layer 0"))  # its room was given away
    assert entry(record).call == str(ticket(2500, "layer 0"))


def test_long_texts_lose_their_middle() -> None:
    _, record = entered()
    record.record_call(ticket(3, "x" * 5000 + "end", file="/long" * 500 + "/train.py"))
    text = entry(record).call
    assert text.startswith("all_reduce(sum) float32[10] of 'xxx")
    assert "end' (#3 of group 'world.1') at /long/long" in text
    assert text.endswith("/train.py:12 in main")


def test_a_record_that_nobody_began_and_one_of_another_attempt_are_not_seen() -> None:
    book = FlightRecorder.create(2)
    assert book.statuses() == {}
    book.rank_records[0].begin(rank=0, attempt=1)
    assert (book.statuses(), list(book.statuses(1))) == ({}, [0])


def test_to_begin_a_record_forgets_what_it_said() -> None:
    _, record = entered()
    record.record_step(9)
    record.record_call(ticket(3))
    record.wait_for(4, by_script=True)
    record.set_absent_rank(2)
    assert (entry(record).waits_for, record.absent_rank) == (4, 2)
    record.begin(rank=1, attempt=1)
    found = entry(record)
    assert (found.rank, found.step, found.call, found.waits_for) == (1, 0, "", None)
    assert (found.phase, found.where, record.absent_rank) == (
        Phase.STARTING,
        "in echelon.init()",
        None,
    )


def test_a_rank_that_lives_has_not_ended() -> None:
    _, record = entered()
    assert not entry(record).ended
    status = ProcessStatus.of(os.getpid())
    assert status is not None
    assert (entry(record).pid, entry(record).start_ticks) == (os.getpid(), status.start_ticks)


def test_what_is_no_flight_recorder_is_refused() -> None:
    descriptor = os.memfd_create("something else")
    with pytest.raises(OSError, match="is no memory that is called 'echelon flight recorder'"):
        FlightRecorder.open(f"/proc/{os.getpid()}/fd/{descriptor}")
    os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        FlightRecorder.open("/proc/0/fd/3")


def test_a_flight_recorder_that_was_closed_cannot_be_opened_and_still_be_read() -> None:
    book = FlightRecorder.create(1)
    other = FlightRecorder.open(book.path)
    other.rank_records[0].begin(rank=0, attempt=0)
    book.close()
    assert list(book.statuses()) == [0]
    with pytest.raises(OSError, match=r"No such file|is no recorder"):
        FlightRecorder.open(book.path)


def test_steps_are_those_of_one_attempt_and_in_the_order_of_ranks() -> None:
    book = FlightRecorder.create(3)
    other = FlightRecorder.open(book.path)
    for record, rank, attempt in zip(other.rank_records, (1, 0, 2), (1, 1, 0), strict=True):
        record.begin(rank=rank, attempt=attempt)
        record.step_rows.add([rank + 10, *[0] * 22])
    steps = book.steps(attempt=1)
    assert [rank_steps.rank for rank_steps in steps] == [0, 1]
    assert [rank_steps.steps[0].wall_ns for rank_steps in steps] == [10, 11]
    other.rank_records[0].begin(rank=1, attempt=2)
    assert book.steps(attempt=2)[0].steps == {}


@pytest.mark.parametrize(
    ("facts", "doing"),
    [
        ({"start_ticks": -1, "phase": Phase.CLOSED, "waits_for": 1}, "has ended"),
        ({"phase": Phase.CLOSED, "waits_for": 1}, "has closed its world"),
        ({"phase": Phase.CLOSING, "gave_up_on": 1}, "has closed its world"),
        ({"waits_for": 1, "gave_up_on": 2}, "waits for rank 1"),
        ({"gave_up_on": 2}, "has waited in vain for rank 2"),
        ({}, "computes outside communication"),
    ],
)
def test_one_sentence_says_what_a_rank_does(facts: dict[str, Any], doing: str) -> None:
    _, record = entered()
    record.set_phase(Phase.RUNNING)
    assert replace(entry(record), **facts).doing == doing
