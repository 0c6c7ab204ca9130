"""How a process ends that ends early, or whose exit handlers fail."""

import subprocess
import sys

import pytest

from echelon.process.process_end import exit_code_of, exit_text_of

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


# As a process of Python ends with them.
CODES = [
    (None, 0),
    (0, 0),
    (75, 75),
    (True, 1),
    (256, 0),
    (257, 1),
    (-1, 255),
    (1 << 32, 0),
    (1 << 63, 255),
    (-(1 << 70), 255),
    ("no data", 1),
    ("", 1),
    ((3,), 1),
]


@pytest.mark.parametrize("silence", ["sys.stdout.close(); sys.stderr.close()", "sys.stderr = None"])
def test_a_process_that_has_closed_its_streams_ends_with_its_code(silence: str) -> None:
    script = f"import sys; from echelon.process.process_end import end_now; {silence}; end_now(7)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (7, "")


@pytest.mark.parametrize(("given", "code"), CODES)
def test_the_exit_code_is_that_of_a_process(given: object, code: int) -> None:
    assert exit_code_of(SystemExit(given)) == code


@pytest.mark.slow
@pytest.mark.parametrize(("given", "code"), CODES)
def test_python_ends_a_process_with_these_codes(given: object, code: int) -> None:
    ended = subprocess.run([sys.executable, "-ISc", f"raise SystemExit({given!r})"])
    assert ended.returncode == code


def test_only_what_is_no_number_is_printed() -> None:
    ends = map(SystemExit, (None, 3, True, "no data", (1, 2)))
    assert [exit_text_of(end) for end in ends] == ["", "", "", "no data", "(1, 2)"]


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
