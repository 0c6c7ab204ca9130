"""How a process ends that ends early, or whose exit handlers fail."""

import subprocess
import sys

import pytest

from echelon.process.process_end import exit_code_of

FAILS_AT_EXIT = """
import atexit
from echelon.process.process_end import failing_process

def handler():
    raise ValueError("at the end")

atexit.register(print, "no handler comes later")
atexit.register(failing_process(handler))
print("printed", end="")
"""
ENDS_NOW = """
import atexit
from echelon.process.process_end import end_now

atexit.register(print, "no handler comes later")
print("printed", end="")
end_now(7)
"""

ENDS_THOUGH_A_STREAM_IS_HELD = """
import sys, time
from echelon.process.process_end import end_now

class Held:
    def flush(self):
        time.sleep(90)

sys.stdout = Held()
end_now(7, flush_s=0.1)
"""


@pytest.mark.parametrize("end", [SystemExit(), SystemExit(0), SystemExit(75), SystemExit(True)])
def test_a_number_is_the_exit_code(end: SystemExit, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(end) == (end.code or 0)
    assert capsys.readouterr() == ("", "")


def test_a_text_is_printed_and_means_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(SystemExit("no data")) == 1
    assert capsys.readouterr() == ("", "no data\n")


@pytest.mark.parametrize(
    ("script", "code", "error"), [(ENDS_NOW, 7, ""), (FAILS_AT_EXIT, 1, "ValueError: at the end")]
)
def test_a_process_ends_with_its_code_and_all_that_it_has_printed(
    script: str, code: int, error: str
) -> None:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (code, "printed")
    assert error in ended.stderr


def test_a_process_ends_in_time_though_another_thread_holds_its_output() -> None:
    script = ENDS_THOUGH_A_STREAM_IS_HELD
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, b"", b"")
