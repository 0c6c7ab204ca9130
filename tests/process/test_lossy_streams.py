"""Standard streams of a process lose what their file cannot take, and raise nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.process.lossy_streams import has_lost
from tests.children import environ

ROOM = 10_000

# A limit of files stands for a disk: both fail in the middle of a write, then in each.
PRINTS = f"""
import resource, signal, sys
from echelon.process.lossy_streams import lose_rather_than_raise

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({ROOM}, {ROOM}))
if sys.argv[1] != "raises":
    lose_rather_than_raise(marks=sys.argv[1] == "marks")
for step in range(int(sys.argv[2])):
    print("ä" * 700)
    print("ö" * 700, file=sys.stderr)
sys.stdout.flush()
sys.stdout.buffer.write(b"bytes\\n")
sys.stdout.flush()
"""


def printed(folder: Path, how: str, steps: int, *flags: str) -> tuple[int, Path, Path]:
    out, err = folder / "out", folder / "err"
    with open(out, "w") as stdout, open(err, "w") as stderr:
        command = [sys.executable, *flags, "-c", PRINTS, how, str(steps)]
        done = subprocess.run(command, stdout=stdout, stderr=stderr, env=environ(), check=False)
    return done.returncode, out, err


@pytest.mark.parametrize("flags", [(), ("-u",)])
@pytest.mark.parametrize("how", ["leaves", "marks"])
def test_a_print_to_a_full_disk_keeps_what_fits_and_raises_nothing(
    how: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    code, *files = printed(tmp_path, how, 20, *flags)
    assert code == 0
    for file in files:
        assert file.stat().st_size == ROOM
        assert has_lost(file) is (how == "marks")


def test_without_them_such_a_print_ends_the_program(tmp_path: Path) -> None:
    assert printed(tmp_path, "raises", 20, "-u")[0] != 0


@pytest.mark.parametrize("flags", [(), ("-u",)])
def test_a_file_with_room_gets_every_byte_in_order_and_no_mark(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    code, out, err = printed(tmp_path, "marks", 3, *flags)
    assert code == 0
    assert out.read_text() == ("ä" * 700 + "\n") * 3 + "bytes\n"
    assert err.read_text() == ("ö" * 700 + "\n") * 3
    assert not has_lost(out)
    assert not has_lost(err)


def test_a_pipe_that_nobody_reads_still_ends_the_program(tmp_path: Path) -> None:
    script = PRINTS.replace(f"({ROOM}, {ROOM})", "(-1, -1)")  # no limit
    command = [sys.executable, "-u", "-c", script, "marks", "9"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"BrokenPipeError" in process.stderr.read()
    assert process.returncode != 0
