"""Locks, steps and schedules of somebody else end in a sentence and take no memory."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import echelon as ec
from echelon.checkpoint.records import MAX_MANIFEST_NBYTES
from echelon.pipeline import Schedule, schedule, simulate, to_page

# --- locks and steps -----------------------------------------------------------------------------


def test_nobody_else_can_open_the_lock_of_a_save_and_so_hold_it(tmp_path: Path) -> None:
    ec.save(tmp_path, model=nn.Linear(2, 2), step=1)
    lock = tmp_path / ".lock"
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    lock.chmod(0o644)  # as an earlier version left it
    ec.save(tmp_path, model=nn.Linear(2, 2), step=2)
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_stop_saves(tmp_path: Path) -> None:
    ec.save(tmp_path, model=nn.Linear(2, 2), step=1)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    child = os.fork()
    if not child:
        os.setresuid(65534, 65534, 65534)
        try:
            fcntl.flock(os.open(tmp_path / ".lock", os.O_RDONLY), fcntl.LOCK_EX)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a name of a socket is short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


def a_large_file(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(MAX_MANIFEST_NBYTES + 1)  # takes no room on the disk


@pytest.mark.parametrize(
    "make",
    [a_socket, os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), a_large_file],
    ids=["socket", "fifo", "folder", "link to a device", "larger than any manifest"],
)
def test_a_step_whose_manifest_is_no_file_is_passed_over(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2):
        ec.save(tmp_path, model=model, step=step)
    manifest = tmp_path / "step-000000002" / "manifest.json"
    manifest.unlink()
    make(manifest)
    with pytest.raises(ec.CheckpointCorrupt):
        ec.load(tmp_path, model=model)
    with pytest.warns(UserWarning, match="step-000000002"):
        assert ec.load(tmp_path, model=model, fallback=True).step == 1


# --- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0,0F999999999,0B0", "rank 0, index 1 .0F999999999.: there are 3 computations"),
        ("0F0,0B0\n999999999F0", "rank 1, index 0 .999999999F0.: there are 3 computations"),
        ("0F0,999999999UNSHARD", "999999999UNSHARD.: there are 1 computations"),
        ("0F0,0SEND_F999999999", "0SEND_F999999999.: there are 1 computations"),
        ("(0F999999999;1B0)OVERLAP_F_B", "of microbatch 999999999 and of those before it are"),
        ("0F" + "9" * 5000, "this is no action"),  # Python refuses to read such a number
        ("0F٣", "this is no action"),  # another script's digit
        ("0F0\r0B0", "its text is no CSV: new-line character"),
        ("0F0\n" + "x" * 200_000, "rank 1: its text is no CSV: field larger"),
        ("\n" * 70_000, "more than 65536 rows"),
        ("0F0" + " " * 2**26, "its text has 67108867 characters"),
        (
            ",".join(f"{i}F0" for i in range(500)) + "," + ",".join(f"0F{i}" for i in range(500)),
            "500 stages and 500 microbatches, which need 250000 forwards, and 1000 computations",
        ),
    ],
    ids=lambda value: value[:20],
)
def test_a_schedule_that_asks_for_memory_or_is_no_csv_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ec.errors.ScheduleError, match=sentence) as info:
        Schedule.from_csv(text)
    assert len(str(info.value)) < 500


def test_what_a_terminal_would_obey_in_a_schedule_is_escaped() -> None:
    with pytest.raises(ec.errors.ScheduleError, match=r"'\\x1b\[31m0F0'"):
        Schedule.from_csv("\x1b[31m0F0")


def test_the_unit_of_a_page_is_text_and_not_html() -> None:
    simulation = simulate(schedule("1f1b", 2, 4, 2))
    page = to_page(simulation, unit="<script>alert(1)</script>")
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 2
    with pytest.raises(ec.errors.ArgumentError, match="unit is 3"):
        to_page(simulation, unit=3)  # type: ignore[arg-type]
