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
