"""Which rank is to blame: from records of failures, and from who waits for whom."""

from typing import Any

import pytest
import torch

from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall
from echelon.diagnosis.failure_record import FailureRecord, Reason
from echelon.diagnosis.root_cause import end_of_wait_chain, peer_failure, root_cause
from echelon.errors import CollectiveMismatch, CommTimeout, RankFailed


def call(rank: int, signature: CallSignature, position: int = 4) -> CollectiveCall:
    return CollectiveCall(
        signature, CallSite("train.py", 10 + rank, "main"), position, "world", rank, True
    )


REDUCE = CallSignature("all_reduce", torch.float32, (10,), "sum")
GATHER = CallSignature("all_gather_single", torch.float32, (10,))


def test_a_timeout_without_notices_names_those_that_were_waited_for() -> None:
    report = FailureRecord.of_call(call(0, REDUCE), late=True, missing=[1, 2], seconds=3.0)
    error, final = peer_failure(report, {}, (0, 1, 2))
    assert isinstance(error, CommTimeout)
    assert (error.missing, final) == ((1, 2), False)


def test_a_rank_that_waits_for_another_one_is_not_blamed() -> None:
    report = FailureRecord.of_call(call(0, REDUCE), late=False, missing=[1], seconds=3.0)
    other = FailureRecord.of_call(call(1, REDUCE), late=True, missing=[2], seconds=3.0)
    error, _ = peer_failure(report, {1: other}, (0, 1, 2))
    assert isinstance(error, RankFailed)
    assert error.failed_rank == 2
    assert "did not come: rank 1 waited 3.0 s for it" in error.cause


def test_a_rank_that_came_too_late_learns_who_gave_up() -> None:
    report = FailureRecord.of_call(call(0, REDUCE), late=False, missing=[1], seconds=0.1)
    other = FailureRecord.of_call(call(1, REDUCE), late=True, missing=[0], seconds=3.0)
    error, _ = peer_failure(report, {1: other}, (0, 1))
    assert "rank 1 gave up after it had waited 3.0 s for this rank" in str(error)


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    report = FailureRecord.of_call(call(0, REDUCE), late=True, missing=[1], seconds=3.0)
    gone = FailureRecord(rank=1, reason=Reason.LEFT)
    error, final = peer_failure(report, {1: gone}, (0, 1))
    assert isinstance(error, RankFailed)
    assert (error.failed_rank, error.cause) == (1, "closed its world and left")
    assert final


def test_calls_of_one_position_are_compared() -> None:
    report = FailureRecord.of_call(call(0, REDUCE), late=True, missing=[1], seconds=3.0)
    other = FailureRecord.of_call(call(1, GATHER), late=False, missing=[0], seconds=0.1)
    error, final = peer_failure(report, {1: other}, (0, 1))
    assert isinstance(error, CollectiveMismatch)
    assert final


def test_calls_of_other_positions_are_not_compared() -> None:
    report = FailureRecord.of_call(call(0, REDUCE), late=True, missing=[1], seconds=3.0)
    other = FailureRecord.of_call(call(1, GATHER, position=9), late=True, missing=[2], seconds=3.0)
    error, _ = peer_failure(report, {1: other}, (0, 1, 2))
    assert isinstance(error, CommTimeout)
    assert "rank 1 waits in all_gather_single float32[10]" in str(error)


@pytest.mark.parametrize(
    ("sent", "received", "differ"),
    [
        ((torch.float32, (6,), "tag 0"), (torch.float32, (6,), "tag 0"), False),
        ((torch.float32, (6,), "tag 0"), (torch.float32, (4,), "tag 0"), True),
        ((torch.float32, (6,), "tag 0"), (torch.int32, (6,), "tag 0"), True),
        ((torch.float32, (6,), "tag 0"), (torch.float32, (6,), "tag 1"), True),
        ((torch.float32, (6,), "a root=1 b"), (torch.float32, (6,), "a root=2 b"), True),
    ],
)
def test_both_ends_of_a_message_are_compared_but_for_the_peer(
    sent: tuple[Any, ...], received: tuple[Any, ...], differ: bool
) -> None:
    records = [
        FailureRecord.of_call(
            call(rank, CallSignature(op, dtype, shape, root=1 - rank, label=label)),
            late=True,
            missing=[1 - rank],
            seconds=3.0,
        )
        for rank, (op, (dtype, shape, label)) in enumerate([("send", sent), ("recv", received)])
    ]
    for rank in (0, 1):
        error, _ = peer_failure(records[rank], {1 - rank: records[1 - rank]}, (0, 1))
        assert isinstance(error, CollectiveMismatch) == differ


def test_without_a_store_nobody_is_said_to_have_died() -> None:
    report = FailureRecord.of_call(call(0, REDUCE), late=False, missing=[1], seconds=0.1)
    error, _ = peer_failure(report, {}, (0, 1), store_is_gone=True)
    assert "why is not known, because the store is gone" in str(error)


def test_of_a_rank_whose_process_lives_nobody_says_that_it_died() -> None:
    report = FailureRecord.of_call(call(0, REDUCE), late=False, missing=[1], seconds=0.1)
    error, _ = peer_failure(report, {}, (0, 1), alive=[1], seconds=10.0)
    assert "its process lives, but has not said why in 10.0 s" in str(error)


def stopped(rank: int, reason: Reason, **facts: object) -> FailureRecord:
    return FailureRecord(rank=rank, reason=reason, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("records", "cause"),
    [
        ([], None),
        ([stopped(0, Reason.ENDED), stopped(1, Reason.ENDED)], None),  # nobody failed by itself
        ([stopped(0, Reason.RAISED), stopped(1, Reason.DIED)], 1),  # it could not say why
        ([stopped(0, Reason.EXITED, exit_code=1), stopped(1, Reason.RAISED)], 1),
        ([stopped(0, Reason.RAISED, time_s=2.0), stopped(1, Reason.RAISED, time_s=1.0)], 1),
        ([stopped(0, Reason.LOST, failed_rank=1), stopped(1, Reason.TIMEOUT, missing=(0,))], 1),
        # It has issued another call because it raised.
        ([stopped(0, Reason.RAISED, type="CollectiveMismatch"), stopped(1, Reason.RAISED)], 1),
        # It wants to be started again.
        ([stopped(0, Reason.EXITED, exit_code=75), stopped(1, Reason.EXITED, exit_code=3)], 1),
        # One has looked at the rank that it waited for.
        ([stopped(0, Reason.TIMEOUT), stopped(1, Reason.TIMEOUT, time_s=9.0, stuck="sleeps")], 1),
        # Rank 1 has waited in vain itself, for one that has said nothing.
        (
            [
                stopped(0, Reason.TIMEOUT, failed_rank=1, time_s=1.0),
                stopped(1, Reason.TIMEOUT, failed_rank=2, time_s=2.0),
            ],
            1,
        ),
        (
            [
                stopped(0, Reason.LOST, failed_rank=1, time_s=1.0),
                stopped(1, Reason.LOST, failed_rank=2, time_s=2.0),
            ],
            1,
        ),
    ],
)
def test_who_ended_by_itself_comes_before_those_that_report_it_and_who_knows_most_before_the_others(
    records: list[FailureRecord], cause: int | None
) -> None:
    for ordered in (records, records[::-1]):
        first = root_cause(ordered)
        assert (None if first is None else first.rank) == cause


def test_a_rank_that_raised_is_blamed_before_one_that_only_left() -> None:
    report = FailureRecord.of_call(call(0, REDUCE), late=True, missing=[1, 2], seconds=3.0)
    others = {
        1: FailureRecord(rank=1, reason=Reason.LEFT),
        2: FailureRecord.of(ValueError("boom"), 2),
    }
    error, final = peer_failure(report, others, (0, 1, 2))
    assert str(error).startswith("rank 2 raised ValueError: boom, while this rank was in ")
    assert final


@pytest.mark.parametrize(
    ("waits", "root"),
    [
        ({1: None}, 1),
        ({1: 2, 2: 3, 3: None}, 3),
        ({1: 2}, 2),  # of which nothing is known
        ({1: 0, 0: 1}, 1),  # a circle
        ({1: 2, 2: 3, 3: 2}, 1),
    ],
)
def test_who_holds_up_a_rank_is_found_through_others_that_wait(
    waits: dict[int, int | None], root: int
) -> None:
    assert end_of_wait_chain(1, waits, reporter=0) == root
