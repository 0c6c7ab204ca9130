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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["die_with_parent", "find_mpiexec", "on_ranks", "run_to_end"]

RANK_SCRIPT = Path(__file__).resolve().parent / "peers.py"
SHARED_MEMORY = Path("/dev/shm")
LIMIT_S = 600.0

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

# One torch thread a rank, and loopback for the network modules of MPICH.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}


def find_mpiexec() -> str | None:
    """The launcher of the MPICH that pip installed beside this Python, or None.

    ``gforker`` and not Hydra: it talks to its children over file descriptors and opens no port.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpiexec.gforker", path=str(Path(sys.executable).parent))


def on_ranks(
    target: str, size: int, settings: Mapping[str, Any], *, mpiexec: str | None = None
) -> Any:
    """Call ``function(peers, settings)`` on ``size`` new processes.

    Args:
        target: ``"module:function"``; the module lies in this folder.
        settings: can be written as JSON.
        mpiexec: start the ranks with this, as members of MPICH too.

    Returns:
        What rank 0 returned.

    Raises:
        Exception: a rank failed; under mpiexec its traceback is on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        if mpiexec is None:
            from peers import on_process

            import echelon as ec  # brings torch, which needs its environment first

            args = (target, dict(settings), folder)
            return ec.run(on_process, size, "processes", args=args)[0]
        job = {"target": target, "settings": dict(settings)}
        Path(folder, "job.json").write_text(json.dumps(job))
        # mpi4py as the runner ends all ranks when one raises.
        python = [sys.executable, "-m", "mpi4py", str(RANK_SCRIPT), folder]
        with _no_mpich_memory_left():
            run_to_end([mpiexec, "-n", str(size), *python], LIMIT_S)
        return json.loads(Path(folder, "result.json").read_text())


def run_to_end(command: Sequence[str], limit_s: float) -> None:
    """Run ``command``; if it fails, takes too long or we are ended, end it and all that it started.

    Raises:
        RuntimeError: it failed.
        TimeoutError: ``limit_s`` passed.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    # In a session of its own, so that what it started can be ended with it.
    process = subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        if code := process.wait(limit_s):
            raise RuntimeError(f"{command[0]} ended with exit code {code}")
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} ran longer than {limit_s:g} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    """End as after Ctrl-C, so that the ranks are ended too."""
    raise SystemExit(128 + number)


def die_with_parent() -> None:
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
