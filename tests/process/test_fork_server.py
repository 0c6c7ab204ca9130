"""A program that is ended while its local ranks run leaves no folder of multiprocessing behind."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.processes import wait_until

SCRIPT = """
import time
import echelon as ec

def main(world):
    world.group.barrier()
    if world.rank == 0:
        print("ready", flush=True)
    time.sleep(100)

if __name__ == "__main__":
    ec.run(main, 2, "processes")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGKILL, False)],
)
def test_a_signal_leaves_no_folder(number: signal.Signals, to_all: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # sockets have short names
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        program = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert program.stdout is not None
        with program.stdout:
            assert program.stdout.readline() == "ready\n"
        assert list(Path(folder).glob("pymp-*"))
        (os.killpg if to_all else os.kill)(program.pid, number)
        assert program.wait() == -number
        wait_until(lambda: not list(Path(folder).glob("pymp-*")), limit_s=20)
