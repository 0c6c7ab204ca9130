"""A script ends though its simulated ranks have left something in it that does not end."""

import time

import pytest

from tests.processes import run_python

SCRIPT = """
import atexit, sys, threading, time
import echelon as ec
from echelon.process import time_limits

time_limits.LEFT_BEHIND_S = 0.3

def sleeps():
    time.sleep(float(sys.argv[2]))

def main(world):
    if world.rank == 1:
        match sys.argv[1]:
            case "thread of a rank":
                threading.Thread(target=sleeps, name="uploads", daemon=False).start()
            case "handler of a rank": atexit.register(sleeps)

if sys.argv[1] == "thread of the script":
    threading.Thread(target=sleeps).start()
ec.run(main, 2, timeout=0.2)
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaves", "says"),
    [
        ("thread of a rank", "the thread 'uploads' of a simulated rank"),
        ("handler of a rank", "an exit handler of a simulated rank"),
    ],
)
def test_what_a_rank_leaves_ends_after_its_time_and_is_named_with_its_stack(
    leaves: str, says: str
) -> None:
    start_s = time.monotonic()
    done = run_python("-c", SCRIPT, leaves, "90")
    assert time.monotonic() - start_s < 60
    assert (done.returncode, done.stdout) == (1, "trained\n")
    first, *rest = done.stderr.splitlines()
    assert first.startswith(f"echelon: the script has ended, but {says} ")
    assert first.endswith("; it had 0.5 s to end")
    assert any(line.endswith("in sleeps") for line in rest)


@pytest.mark.slow
def test_a_thread_of_the_script_itself_may_take_any_time() -> None:
    done = run_python("-c", SCRIPT, "thread of the script", "2.5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
