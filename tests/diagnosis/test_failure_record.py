import json
import multiprocessing
import sys
import threading
from pathlib import Path

import pytest

from echelon.diagnosis.failure_record import FailureRecord, error_file, install_failure_record
from echelon.errors import (
    CheckpointError,
    CollectiveMismatch,
    CommTimeout,
    DeadlockError,
    RankFailed,
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


def test_the_hook_writes_a_record_and_python_still_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: reported.append(kind))
    remove = install_failure_record(tmp_path / "error.json", 1, lambda: "at step 7")
    error = raised(ValueError("boom"))
    sys.excepthook(type(error), error, error.__traceback__)
    record = FailureRecord.read(tmp_path / "error.json")
    assert record is not None
    assert (record.rank, record.type, reported) == (1, "ValueError", [ValueError])
    assert record.headline == "rank 1 at step 7 raised ValueError: boom"
    remove()
    assert sys.excepthook(KeyError, KeyError(), None) is None
    assert reported == [ValueError, KeyError]


def test_what_a_fork_or_another_thread_reports_ends_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: reported.append(kind))
    install_failure_record(tmp_path / "error.json", rank=1)
    # As multiprocessing does in its thread that serves files, mostly of a worker that loads data.
    thread = threading.Thread(target=sys.excepthook, args=(OSError, OSError(), None))
    thread.start()
    thread.join()
    assert reported == [OSError]
    worker = multiprocessing.get_context("fork").Process(
        target=sys.excepthook, args=(OSError, OSError(), None)
    )
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert not (tmp_path / "error.json").exists()


def test_ctrl_c_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: None)
    install_failure_record(tmp_path / "error.json", rank=1)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not (tmp_path / "error.json").exists()


def test_our_own_variable_wins_over_torchruns() -> None:
    both = {"ECHELON_ERROR_FILE": "/a", "TORCHELASTIC_ERROR_FILE": "/b"}
    assert error_file(both) == Path("/a")
    assert error_file({"TORCHELASTIC_ERROR_FILE": "/b"}) == Path("/b")
    assert error_file({}) is None


def test_a_very_long_message_is_cut() -> None:
    record = FailureRecord.of(raised(ValueError("x" * 100_000)), rank=0)
    assert len(record.message) < 5000
