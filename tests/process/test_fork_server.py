"""The server that ranks are forked from leaves no folder behind and is not interrupted."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.children import environ
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


IMPORTING = """
import multiprocessing
import os
import signal
import sys
import time

from echelon.launch.processes import start_fork_server


def child():
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    print(blocked, signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: print("terminated", flush=True))
    fork = os.fork()
    if not fork:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)


if __name__ == "__main__":
    try:
        start_fork_server("importing_slowly")
        time.sleep(100)
    except KeyboardInterrupt:
        process = multiprocessing.get_context("forkserver").Process(target=child)
        process.start()
        process.join()
"""


@pytest.mark.slow
def test_the_server_imports_on_after_ctrl_c_and_its_children_have_their_signals(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(IMPORTING)
    (tmp_path / "importing_slowly.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(0.5)\n"
    )
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        env={**environ(), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "importing\n"
    os.killpg(program.pid, signal.SIGINT)
    assert program.communicate() == ("False True\nterminated\n0\n", "")
    assert program.returncode == 0
