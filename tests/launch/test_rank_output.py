import io
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from echelon.errors import ArgumentError
from echelon.launch.rank_output import RunFolder, Screen, has_output

ABANDONS = """
import os, signal
from echelon.launch.rank_output import RunFolder
print(RunFolder(None).path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folders(parent: Path) -> list[Path]:
    return sorted(parent.glob("echelon-run-*"))


def test_a_folder_goes_with_a_run_that_went_well_and_stays_after_a_failure(
    temporary: Path,
) -> None:
    RunFolder(None).drop()
    assert folders(temporary) == []
    failed = RunFolder(None)
    assert failed.keep() == failed.path
    assert list(failed.path.iterdir()) == []
    RunFolder(None).drop()  # the next run leaves it, too
    assert folders(temporary) == [failed.path]


def test_a_folder_that_the_user_chose_stays_in_any_case(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "logs")
    assert run.path.parent == tmp_path / "logs"
    run.drop()
    assert run.path.exists()


@pytest.mark.parametrize("name", ["file", "file/below", "file/far/below"])
def test_a_place_that_can_be_no_folder_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError) as info:
        RunFolder(tmp_path / name)
    assert str(info.value).startswith(f"{str(tmp_path / name)!r} cannot hold the output")


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_of_one_that_goes_on(
    temporary: Path,
) -> None:
    goes_on = RunFolder(None)
    killed = subprocess.run(
        [sys.executable, "-c", ABANDONS],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert killed.returncode == -signal.SIGKILL
    abandoned = Path(killed.stdout.strip())
    (abandoned / "agent.log").write_text("what it had printed")
    (temporary / "echelon-run-link").symlink_to(abandoned)
    assert abandoned.exists()
    RunFolder(None).drop()
    assert not abandoned.exists()
    assert goes_on.path.exists()
    goes_on.drop()


def test_a_link_of_that_name_is_not_followed(temporary: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "running").touch()
    (temporary / "echelon-run-link").symlink_to(target)
    RunFolder(None).drop()
    assert (target / "running").exists()


CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "train.py", line 3 in main
Extension modules: numpy, torch (total: 2)
"""


WARNING = (
    "[W1123 04:00:00.000000000 socket.cpp:767] [c10d] The hostname of the client socket cannot be "
    "retrieved. err=-3\n"
)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (["loss 1\n", CRASH], "loss 1\n"),
        (["terminate called after throwing an instance of 'c10::Error'\n  what():  x\n"], ""),
        ([WARNING, "loss 1\n"], "loss 1\n"),
        ([WARNING[:30], WARNING[30:], "loss 1\n"], "loss 1\n"),
        # Torch names the rank before each line where there is a default group.
        (
            ["loss 1\n", "[rank0]: Traceback (most recent call last):\n[rank0]: KeyError\n"],
            "loss 1\n",
        ),
        (["[Warmup] 10 %", "\rdone ten times\n"], "done ten times\n"),
    ],
)
def test_the_screen_shows_neither_a_crash_before_its_report_nor_torchs_want_of_a_name_server(
    written: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = io.StringIO()
    monkeypatch.setattr("sys.stderr", errors)
    folder = tmp_path / "run" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    screen = Screen(tmp_path, live=True)
    with open(folder / "stderr.log", "a") as log:
        for text in written:
            log.write(text)
            log.flush()
            screen.show()
        screen.close_attempt(failed="Warmup" not in written[0])
    assert errors.getvalue() == shown


@pytest.mark.parametrize(
    ("text", "is_output"),
    [("", False), (WARNING, False), (WARNING * 3, False), (WARNING + "loss 1\n", True)],
)
def test_torchs_want_of_a_name_server_is_no_output_of_a_rank(
    text: str, is_output: bool, tmp_path: Path
) -> None:
    (tmp_path / "stderr.log").write_text(text)
    assert has_output(tmp_path / "stderr.log") is is_output
