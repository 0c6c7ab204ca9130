"""Starts the ranks of a benchmark as processes, and ends them whatever happens."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["find_mpiexec", "on_ranks"]

RANK_SCRIPT = Path(__file__).resolve().parent / "peers.py"
SHARED_MEMORY = Path("/dev/shm")

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

# One torch thread a rank, and loopback for gloo and for the network modules of MPICH.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
    "FI_TCP_IFACE": "lo",
}


def find_mpiexec() -> str | None:
    """The launcher of the MPICH that pip installed beside this Python, or None.

    ``gforker`` and not Hydra: it talks to its children over file descriptors and opens no port.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpiexec.gforker", path=str(Path(sys.executable).parent))


def on_ranks(
    target: str, size: int, settings: Mapping[str, Any], *, mpiexec: str | None, limit_s: float
) -> Any:
    """Call ``function(peers, settings)`` on ``size`` new processes.

    Args:
        target: ``"module:function"``; the module lies in this folder.
        settings: can be written as JSON.
        mpiexec: start the ranks with this, as members of MPICH too.
        limit_s: seconds after which the ranks are ended.

    Returns:
        What rank 0 returned, as it comes out of JSON.

    Raises:
        RuntimeError: a rank failed; its traceback is on standard error.
        TimeoutError: ``limit_s`` passed.
    """
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        job = {"target": target, "settings": dict(settings), "mpi": mpiexec is not None}
        Path(folder, "job.json").write_text(json.dumps(job))
        tail = [str(RANK_SCRIPT), folder]
        if mpiexec is not None:
            # mpi4py as the runner ends all ranks when one raises.
            commands = [
                ([mpiexec, "-n", str(size), sys.executable, "-m", "mpi4py", *tail], ENVIRONMENT)
            ]
        else:
            commands = [
                ([sys.executable, *tail], {**ENVIRONMENT, "RANK": str(r), "WORLD_SIZE": str(size)})
                for r in range(size)
            ]
        with _no_mpich_memory_left():
            _run_all(commands, limit_s)
        return json.loads(Path(folder, "result.json").read_text())


def _run_all(commands: list[tuple[list[str], dict[str, str]]], limit_s: float) -> None:
    """Run all commands at once; end all when one fails or time is up."""
    # Each in a session of its own, so that what mpiexec started can be ended with it.
    running: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + limit_s
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        for command, extra in commands:
            environment = {**os.environ, **extra}
            running.append(
                subprocess.Popen(
                    command, env=environment, start_new_session=True, preexec_fn=_die_with_parent
                )
            )
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            if time.monotonic() > end:
                raise TimeoutError(f"the ranks of the benchmark ran longer than {limit_s:.0f} s")
            time.sleep(0.05)
        if any(codes):
            raise RuntimeError(f"the ranks of the benchmark ended with exit codes {codes}")
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    """End like after Ctrl-C, so that the ranks are ended too."""
    raise SystemExit(128 + number)


def _die_with_parent() -> None:
    """Runs in the child: a benchmark that is killed must not leave ranks behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def _no_mpich_memory_left() -> Iterator[None]:
    """Remove the shared memory that MPICH leaves behind when its ranks are killed."""
    before = set(SHARED_MEMORY.glob("mpich_shm_*"))
    try:
        yield
    except BaseException:
        for path in set(SHARED_MEMORY.glob("mpich_shm_*")) - before:
            path.unlink(missing_ok=True)
        raise
