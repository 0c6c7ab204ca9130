"""A log has every whole record, whatever ends the process, and shows each changed byte."""

import errno
import os
from pathlib import Path

import pytest
import torch

from echelon.errors import BlackboxCorrupt
from echelon.laboratory import step_log
from echelon.laboratory.step_log import RecordKind, StepLog, StepLogWriter


def write(path: Path, steps: int = 3) -> StepLogWriter:
    log = StepLogWriter(path)
    for step in range(1, steps + 1):
        log.append(RecordKind.BEGIN, step, {"batch": torch.full((5,), step)}, "batch")
        log.append(RecordKind.NOTE, step, {"loss": step / 2}, "note")
    return log


def test_records_come_back(tmp_path: Path) -> None:
    writer = write(tmp_path / "log")
    log = StepLog(tmp_path / "log")  # also while it is being written
    assert log.steps() == [1, 2, 3]
    assert torch.equal(log.begin(2)["batch"], torch.full((5,), 2))
    assert log.notes(3) == [{"loss": 1.5}]
    assert log.error() is None
    writer.append(RecordKind.ERROR, 3, {"type": "ValueError", "text": "no"}, "error")
    writer.close()
    assert StepLog(tmp_path / "log").error() == {"type": "ValueError", "text": "no"}


def test_a_file_that_ends_anywhere_has_the_records_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, 2).close()
    whole = path.read_bytes()
    ends = [record.offset for record in StepLog(path).records] + [len(whole)]
    for length in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:length])
        assert len(StepLog(path).records) == sum(end <= length for end in ends[1:])


def test_each_changed_byte_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, 1).close()
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        try:
            log = StepLog(path)
            values = [log.begin(1), *log.notes(1)]
        except (BlackboxCorrupt, IndexError):  # the step is not there any more
            continue
        assert len(values) < 2, f"byte {place}"  # the note is not there any more


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"anything")
    with pytest.raises(BlackboxCorrupt, match="does not begin as the log of a black box"):
        StepLog(tmp_path / "log")


def test_an_existing_file_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    with pytest.raises(FileExistsError):
        StepLogWriter(tmp_path / "log")


def test_a_record_that_cannot_be_written_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write(tmp_path / "log", 2)

    calls: list[int] = []

    def until_the_disk_is_full(descriptor: int, buffers: list[memoryview]) -> int:
        calls.append(descriptor)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, buffers[0][:7])

    size = (tmp_path / "log").stat().st_size
    monkeypatch.setattr(step_log.os, "writev", until_the_disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        writer.append(RecordKind.BEGIN, 3, {"batch": 1}, "batch")
    assert (tmp_path / "log").stat().st_size == size
    with pytest.raises(OSError, match=r"No space left on device: '.*other'"):
        StepLogWriter(tmp_path / "other")
    assert StepLog(tmp_path / "other").steps() == []
    monkeypatch.undo()
    writer.append(RecordKind.BEGIN, 3, {"batch": 1}, "batch")
    writer.close()
    assert StepLog(tmp_path / "log").steps() == [1, 2, 3]


def test_writes_that_the_system_cuts_short_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        step_log.os, "writev", lambda descriptor, buffers: os.write(descriptor, buffers[0][:5])
    )
    write(tmp_path / "log", 2).close()
    log = StepLog(tmp_path / "log")
    assert torch.equal(log.begin(2)["batch"], torch.full((5,), 2))
