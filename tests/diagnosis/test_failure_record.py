import json
from pathlib import Path

import pytest
import torch

from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall
from echelon.diagnosis.failure_record import FailureRecord, Reason, cause_of
from echelon.errors import (
    CheckpointError,
    CollectiveMismatch,
    CommTimeout,
    DeadlockError,
    RankFailed,
    StateError,
)


def raised(error: BaseException) -> BaseException:
    """``error`` with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    record = FailureRecord.of(raised(ValueError("boom\nsecond")), rank=3)
    record.write(tmp_path / "deep" / "error.json")
    assert FailureRecord.read(tmp_path / "deep" / "error.json") == record
    assert record.headline == "rank 3 raised ValueError: boom"
    assert record.place.startswith(__file__)


def test_a_record_of_a_rank_that_waited_in_vain_has_the_stacks_beside_it(tmp_path: Path) -> None:
    error = CommTimeout("barrier", [1], 10.0, "  rank 1 computes", stuck={1: "at step 3 computes"})
    error.add_note("the stacks")
    record = FailureRecord.of(raised(error), rank=0, where="at step 4")
    record.write(tmp_path / "error.json")
    assert FailureRecord.read(tmp_path / "error.json") == record
    assert (tmp_path / "error-stacks.txt").read_text() == "the stacks"
    assert record.headline == "rank 1 at step 3 computes; rank 0 waited 10.0 s for it"
    plain = FailureRecord.of(raised(CommTimeout("barrier", [1], 10.0)), rank=0)
    assert plain.headline == "rank 1 did not come; rank 0 waited 10.0 s for it"


def test_torchrun_finds_the_fields_it_looks_for(tmp_path: Path) -> None:
    FailureRecord.of(raised(ValueError("boom")), rank=0).write(tmp_path / "error.json")
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert "Traceback" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": "torchrun\'s own"}'])
def test_a_file_that_is_not_ours_is_no_record(content: str, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(content)
    assert FailureRecord.read(tmp_path / "error.json") is None
    assert FailureRecord.read(tmp_path / "missing.json") is None


def test_of_a_save_only_the_rank_where_it_failed_is_the_cause() -> None:
    error = raised(CheckpointError("raised ValueError: boom", "runs/a", rank=1))
    assert FailureRecord.of(error, rank=0).follows
    assert not FailureRecord.of(error, rank=1).follows


def test_errors_that_only_notice_another_rank_say_so() -> None:
    noticed = FailureRecord.of(raised(RankFailed(2, "died", "barrier")), rank=0)
    assert (noticed.follows, noticed.failed_rank) == (True, 2)
    assert FailureRecord.of(raised(CommTimeout("barrier", [1], 5.0)), rank=0).follows
    for cause in (
        CollectiveMismatch("world", 0, {0: "a", 1: "b"}),
        DeadlockError({}, []),
        KeyError(),
    ):
        assert not FailureRecord.of(raised(cause), rank=0).follows


def after(before: BaseException, error: BaseException) -> BaseException:
    """``error`` as it is raised in ``finally`` after ``before``."""
    try:
        try:
            raise before
        finally:
            raise error
    except type(error) as caught:
        return caught


def test_a_record_is_of_what_an_error_follows() -> None:
    boom, late = ValueError("boom"), CommTimeout("barrier", [1], 5.0)
    differ, lost = CollectiveMismatch("g", 0, {0: "a", 1: "b"}), RankFailed(1, "died", "barrier")
    stopped = StateError("barrier cannot run")
    stopped.__cause__ = raised(late)
    for error, first in (
        (after(boom, differ), "ValueError"),
        (after(differ, lost), "ValueError"),  # and differ after boom
        (stopped, "CommTimeout"),
        (after(RankFailed(1, "died", "barrier"), RuntimeError()), "RankFailed"),
        (after(KeyError(), RankFailed(1, "died", "barrier")), "RankFailed"),
        (after(KeyError(), RankFailed(1, "raised DeadlockError: a", "barrier")), "KeyError"),
        (after(KeyError(), RuntimeError()), "RuntimeError"),
    ):
        assert FailureRecord.of(error, rank=0).type == first
    other = RankFailed(1, "raised ValueError: boom", "barrier")
    other.__cause__ = raised(ValueError("boom"))  # of the other rank
    assert FailureRecord.of(raised(other), rank=0).type == "RankFailed"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("boom"), "raised ValueError: boom"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt"),
        (SystemExit(3), "exited with code 3"),
        (SystemExit(256), "exited with code 0"),
        (SystemExit("no data"), "exited with code 1"),
    ],
)
def test_others_are_told_what_ended_a_rank(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause


def test_a_very_long_message_is_cut() -> None:
    record = FailureRecord.of(raised(ValueError("x" * 100_000)), rank=0)
    assert len(record.message) < 5000


def test_a_record_survives_the_store() -> None:
    call = CallSignature("all_reduce", torch.float32, (10,), "sum")
    ticket = CollectiveCall(call, CallSite("train.py", 11, "main"), 4, "world", 1, True)
    record = FailureRecord.of_call(ticket, late=True, missing=[2], seconds=1.5, sends=(1, 2))
    assert FailureRecord.load(record.dump().encode(), record.rank) == record


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("rank", 2),
        ("rank", True),
        ("reason", "NONSENSE"),
        ("reason", ["LEFT"]),
        ("text", 1),
        ("seconds", "1"),
        ("sends", [1, "2"]),
        ("sends", 3),
        ("failed_rank", "1"),
    ],
)
def test_what_somebody_else_wrote_into_the_store_is_no_record(fact: str, value: object) -> None:
    facts = json.loads(FailureRecord(rank=1, reason=Reason.LEFT).dump())
    assert FailureRecord.load(json.dumps(facts).encode(), 1) is not None
    assert FailureRecord.load(json.dumps(facts | {fact: value}).encode(), 1) is None
    assert FailureRecord.load(b"[" * 100_000, 1) is None


def test_nothing_in_a_record_of_the_store_is_obeyed_by_a_terminal() -> None:
    text = FailureRecord(rank=1, reason=Reason.RAISED, message="\x1b[31mred").dump().encode()
    record = FailureRecord.load(text, 1)
    assert record is not None
    assert record.message == "\\x1b[31mred"
