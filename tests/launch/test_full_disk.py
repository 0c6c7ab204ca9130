"""A job of ``echelon run`` goes on to its end when the disk under its logs is full."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.children import environ

NBYTES = 1 << 18

# It prints more than there is room for, and says elsewhere that it has come to its end.
PRINTS = """
import os, pathlib, sys

rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(20):
    print(f"{step}" * 20_000)
    print("e" * 20_000, file=sys.stderr)
(pathlib.Path(sys.argv[1]) / f"done-{rank}-{attempt}").touch()
if sys.argv[2] == "fails" and rank == "1":
    raise ValueError("boom")
if sys.argv[2] == "restarts" and rank == "1" and attempt == 0:
    raise ValueError("boom")
if sys.argv[2] == "saves":
    sys.exit(75)
"""


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A small disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={NBYTES}", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk; a limit of files is tested everywhere")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "attempts"),
    [("finishes", 0, 1), ("saves", 75, 1), ("fails", 1, 1), ("restarts", 0, 2)],
)
def test_a_full_disk_under_the_logs_ends_no_rank_and_the_job_ends_as_its_ranks_do(
    how: str, code: int, attempts: int, full: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRINTS)
    options = ["--ranks", "2", "--max-restarts", str(attempts - 1)]
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "run", *options, str(script), str(tmp_path), how],
        env=environ(TMPDIR=str(full)),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code, done.stderr[-2000:]
    ends = {f"done-{rank}-{attempt}" for rank in range(2) for attempt in range(attempts)}
    assert {path.name for path in tmp_path.glob("done-*")} == ends
    assert f"ranks 0, 1 printed more than {full}" in done.stderr
    if how == "fails":
        assert "rank 1 exited with code 1" in done.stderr
